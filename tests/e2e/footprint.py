"""What a server's processes hold of the machine."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.cluster import Server


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one server's processes hold.

    A prefill server's workers are left out of the memory: they compute prompts of ever new shapes, for each of which
    oneDNN keeps a kernel (400 MB after 1,500 requests, with the connector or without), and take no part in a pull.
    """

    resident_mb: float
    threads: int
    descriptors: int

    @classmethod
    def of(cls, server: Server) -> "Footprint":
        computing = server.processes("Worker") if server.spec.role == "kv_producer" else []
        pages = threads = descriptors = 0
        for pid in server.processes(""):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                directory = Path(f"/proc/{pid}")
                if pid not in computing:
                    pages += int((directory / "statm").read_text().split()[1])
                threads += len(list((directory / "task").iterdir()))
                descriptors += len(list((directory / "fd").iterdir()))
        return cls(pages * os.sysconf("SC_PAGESIZE") / 1e6, threads, descriptors)
