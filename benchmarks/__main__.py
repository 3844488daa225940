"""Runs every benchmark in turn: ``python -m benchmarks``."""

from benchmarks import batch_copy, host_blocks, planning, pull, reshape, unequal


def main() -> None:
    """Run all, with their default arguments."""
    for benchmark in (batch_copy, host_blocks, planning, pull, reshape, unequal):
        print(f"== {benchmark.__name__.rpartition('.')[2]}")
        benchmark.main()


if __name__ == "__main__":
    main()
