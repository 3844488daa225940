"""A process of its own for what a benchmark measures against."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any


def start_apart(serve: Callable[..., None], *arguments: Any) -> tuple[Connection, SpawnProcess]:
    """Run ``serve`` with an end of a pipe and the arguments in a new process; return the other end, and the process.

    Receiving from the pipe raises EOFError once the process has ended.
    """
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return ours, process
