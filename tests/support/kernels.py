"""What numba compiles is kept on disk for all processes of the tests, until a source of it changes."""

import fcntl
import hashlib
import importlib
import os
import shutil
from contextlib import suppress
from functools import partial
from typing import Any

from tests.support.sources import ROOT

#: The modules with loops that numba compiles. ``reshape_kernel``, which no server on the CPU uses, imports torch.
MODULES = (
    "layout.staging",
    "transfer.copies.batch.single",
    "transfer.copies.checksums.block_checksums",
    "transfer.copies.reshape.reshape",
    "transfer.engine.cuda_ipc_copies",
)


def keep_compiled() -> None:
    """Import ``MODULES``, which must not have been imported, so that what is compiled for them is kept.

    numba compares the time of a loop's own file only, not of the files of what the loop calls: all are in the digest.
    """
    packages = "layout", "transfer/copies", "transfer/engine"
    files = sorted(file for package in packages for file in (ROOT / package).rglob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    directory = ROOT / ".cache" / "kernels" / digest
    with suppress(OSError):  # of a checkout that cannot be written
        directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK):
        return
    for other in directory.parent.iterdir():
        if other != directory:
            shutil.rmtree(other, ignore_errors=True)
    os.environ["NUMBA_CACHE_DIR"] = str(directory)
    import numba  # noqa: PLC0415  reads the variable

    _one_process_at_a_time()
    njit, numba.njit = numba.njit, partial(numba.njit, cache=True)
    try:
        for module in MODULES:
            importlib.import_module(module)
    finally:
        numba.njit = njit


def _one_process_at_a_time() -> None:
    """numba reads an index, chooses a file by it and writes both: two processes could choose the same file."""
    from numba.core.caching import IndexDataCacheFile  # noqa: PLC0415

    def locked(plain: Any) -> Any:
        def call(self: Any, *arguments: Any) -> Any:
            with (ROOT / ".cache" / "kernels.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                return plain(self, *arguments)

        return call

    for name in ("load", "save"):
        setattr(IndexDataCacheFile, name, locked(getattr(IndexDataCacheFile, name)))
