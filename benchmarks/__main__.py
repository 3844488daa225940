"""Runs every benchmark in turn: ``python -m benchmarks``."""

from benchmarks import batch_copy, beside, host_blocks, host_step, multi_turn, planning, pull, reshape, unequal, waiting


def main() -> None:
    """Run all, with their default arguments."""
    for benchmark in (
        batch_copy,
        host_blocks,
        host_step,
        planning,
        pull,
        beside,
        reshape,
        unequal,
        waiting,
        multi_turn,
    ):
        print(f"== {benchmark.__name__.rpartition('.')[2]}")
        benchmark.main()


if __name__ == "__main__":
    main()
