"""Shows how far the servers are while they load."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from examples.quickstart.servers import Server, Servers

# What vLLM writes to its log when a stage begins, the latest stage first.
_STAGES = (
    ("Starting vLLM server", "opening the API"),
    ("KV cache size", "warming up"),
    ("Loading weights took", "allocating the KV cache"),
    ("Starting to load model", "loading the weights"),
    ("Initializing a V1 LLM engine", "starting the workers"),
)


def stage(log: str) -> str:
    """What a vLLM server is busy with, by its log."""
    return next((name for words, name in _STAGES if re.search(words, log)), "starting Python")


def wait_ready(console: Console, servers: Servers, waiting: Sequence[Server], timeout_s: float) -> None:
    """Wait for ``waiting`` as ``Servers.wait_ready`` does, and show it."""
    with _display(console, waiting) as display:
        servers.wait_ready(waiting, timeout_s, on_ready=display.ready, on_wait=display.update)
    for server in waiting:
        if not console.is_terminal:
            console.print(f"The {server.name} is ready: {server.url}")


class _Display:
    def __init__(self, progress: Progress, servers: Sequence[Server]) -> None:
        self._progress = progress
        self._tasks = {server.name: progress.add_task(server.name, total=1, stage="") for server in servers}

    def update(self, server: Server) -> None:
        self._progress.update(self._tasks[server.name], stage=stage(server.read_log()))

    def ready(self, server: Server) -> None:
        self._progress.update(self._tasks[server.name], completed=1, stage=f"ready: {server.url}")


@contextmanager
def _display(console: Console, servers: Sequence[Server]) -> Iterator[_Display]:
    columns = (
        SpinnerColumn(finished_text="✓"),
        "{task.description}",
        TimeElapsedColumn(),
        TextColumn("{task.fields[stage]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield _Display(progress, servers)
