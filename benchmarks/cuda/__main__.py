"""Measures on one CUDA GPU: ``make bench-cuda``. Writes benchmarks/results/cuda-CARD.json.

P and D are real vLLM servers on the one GPU, with a random model whose cache is as large as a served model's (96 KiB a
token). ``--dry-run`` runs the same on the CPU with short prompts, and writes nothing.
"""

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks import record
from benchmarks.cuda import copies, servers
from benchmarks.cuda.servers import Plan
from benchmarks.pair import ATTENTION, DIRECTORY
from examples.quickstart.servers import ServerFailed
from transfer.copies.batch.base import Direction

PARTS = ("copies", "servers")
DIRECTIONS = (Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with short prompts; writes nothing")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2000, 8000, 30000], help="tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--protocol", default="tcp", help="of the transfer engine; others than tcp are in the file's name"
    )
    return parser.parse_args(words)


def card() -> dict[str, Any]:
    """Return what the GPU is, and for which CUDA PyTorch is built."""
    free, total = torch.cuda.mem_get_info()
    found = {"name": torch.cuda.get_device_name(0), "cuda": torch.version.cuda, "memory_gib": round(total / 2**30)}
    return found | {"free_gib": round(free / 2**30)}


def result_name(name: str, protocol: str) -> str:
    """Return the name of a card's file: ``cuda-h200`` for "NVIDIA H200"."""
    words = [word for word in re.findall(r"[a-z0-9]+", name.lower()) if word != "nvidia"]
    return "-".join(["cuda", *words, *([protocol] if protocol != "tcp" else [])])


def measure(arguments: argparse.Namespace, place: copies.Place) -> Iterator[dict[str, Any]]:
    """Yield figures, part by part."""
    if "copies" in arguments.parts:
        print("copies")
        yield {"reshape": copies.reshape(place)}
        yield {"batches": {each.value: copies.batches(place, each) for each in DIRECTIONS}}
    if "servers" in arguments.parts:
        print("servers")
        plan = Plan(tuple(sorted(arguments.lengths)), arguments.repeats, 8000, 2000, arguments.protocol, is_mapped=True)
        model = servers.GPU_MODEL
        if arguments.dry_run:
            plan, model = Plan((100, 400), 2, 200, 100, "tcp", is_mapped=False), ATTENTION
        yield from servers.measure(place, model, plan)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and write the results after each part: one that fails later costs nothing of it."""
    arguments = parse(words)
    if not arguments.dry_run and not torch.cuda.is_available():
        sys.exit("PyTorch sees no CUDA GPU here: make bench-cuda says what is missing; --dry-run measures nothing")
    place = copies.Place("cpu", 4 << 20, 2) if arguments.dry_run else copies.Place("cuda", 1 << 30, 9)
    command, start = ["benchmarks.cuda", *(sys.argv[1:] if words is None else words)], time.monotonic()
    figures: dict[str, Any] = {} if arguments.dry_run else {"card": card(), "protocol": arguments.protocol}
    try:
        for part in measure(arguments, place):
            figures |= part
            if not arguments.dry_run:
                name = result_name(figures["card"]["name"], arguments.protocol)
                record.write(name, command, figures, seconds=time.monotonic() - start)
    except ServerFailed as error:
        sys.exit(f"{error}. The end of its log in {DIRECTORY}:\n{error.log_tail}")


if __name__ == "__main__":
    main()
