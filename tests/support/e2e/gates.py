"""Places at which the threads of a server's workers stop while a test has them closed.

So a test chooses the point at which something happens to a process: it closes a gate, sends a request, and waits until
the workers have come to the gate. A gate is a file in a directory that test and workers share, and so is whatever waits
at it. It outlives the processes: what is killed leaves a file, which is gone when the gate is closed the next time.
"""

import os
import threading
import time
from pathlib import Path
from typing import Literal

from tests.support.waiting import until

#: Tells workers where their gates are.
DIRECTORY_VARIABLE = "PD_CONNECTOR_TEST_GATES"

Place = Literal[
    "step",  # a step of the model's thread, before its orders are carried out
    "pulling",  # half of a read to the device has arrived
    "landing",  # half of a read to host memory has arrived
    "unconfirmed",  # all of a read to host memory has arrived, and P has not been asked whether it is good
    "loading",  # a copy from host memory to the device is next
    "moving",  # a copy of a lease to host memory is next
]

_POLL_S = 0.005


class Gates:
    """All gates of a server. The test closes and opens them, its workers pass them."""

    def __init__(self, directory: Path) -> None:
        """Take the gates in this directory, which need not exist: then all are open."""
        self._directory = directory

    def close(self, place: Place) -> None:
        """Close a gate, at which nobody waits."""
        self._directory.mkdir(exist_ok=True)
        for left in self._directory.glob(f"{place}.*"):
            left.unlink(missing_ok=True)
        (self._directory / place).touch()

    def open(self, *places: Place) -> None:
        """Open these gates, or all of them."""
        for gate in map(self._directory.joinpath, places) if places else self._directory.glob("*"):
            if "." not in gate.name:
                gate.unlink(missing_ok=True)

    def wait_for(self, place: Place, workers: int = 1) -> None:
        """Wait until so many workers have come to a gate that is closed."""
        until(
            lambda: len({name.name.split(".")[1] for name in self._directory.glob(f"{place}.*")}) >= workers,
            lambda: f"{workers} workers at the gate {place!r}: {sorted(self._directory.glob('*'))}",
        )

    def pass_through(self, place: Place) -> None:
        """Wait while a gate is closed."""
        gate = self._directory / place
        if not gate.exists():
            return
        here = self._directory / f"{place}.{os.getpid()}.{threading.get_ident()}"
        here.touch()
        while gate.exists():
            time.sleep(_POLL_S)
        here.unlink(missing_ok=True)
