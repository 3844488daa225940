"""What numba compiles is kept on disk for all processes of the tests, until a source of it changes."""

import hashlib
import importlib
import os
import shutil
from functools import partial

from tests.support.sources import ROOT

#: The modules with loops that numba compiles. ``reshape_kernel``, which no server on the CPU uses, imports torch.
MODULES = (
    "layout.staging",
    "transfer.copies.batch.single",
    "transfer.copies.checksums.block_checksums",
    "transfer.copies.reshape.reshape",
)


def keep_compiled() -> None:
    """Import ``MODULES``, which must not have been imported, so that what is compiled for them is kept.

    numba compares the time of a loop's own file only, not of the files of what the loop calls: all are in the digest.
    """
    files = sorted(file for package in ("layout", "transfer/copies") for file in (ROOT / package).rglob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    directory = ROOT / ".cache" / "kernels" / digest
    directory.mkdir(parents=True, exist_ok=True)
    for other in directory.parent.iterdir():
        if other != directory:
            shutil.rmtree(other, ignore_errors=True)
    os.environ["NUMBA_CACHE_DIR"] = str(directory)
    import numba  # noqa: PLC0415  reads the variable

    njit, numba.njit = numba.njit, partial(numba.njit, cache=True)
    try:
        for module in MODULES:
            importlib.import_module(module)
    finally:
        numba.njit = njit
