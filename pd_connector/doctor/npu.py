"""What this machine's Ascend software is, and whether it does what the connector needs of it.

Checks the first NPU: batched copies of device memory, compared byte by byte. Reads and writes nothing but memory that
it allocates itself. Whether attention operators take caches of all layers together, every engine checks at its start.

Run on a simulated NPU; not run on hardware yet.
"""

import ctypes
import importlib
import os
import re
from contextlib import closing
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import numpy as np

from layout.copies import Copies
from pd_connector.doctor.findings import Check, CheckFailed
from transfer.copies.batch import acl_abi
from transfer.copies.batch.acl import LIBRARY
from transfer.memory import bytes_of

#: Where CANN and the driver say their versions.
_CANN_ROOTS = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_CANN_FILES = ("version.cfg", "version.info", "*/ascend_toolkit_install.info", "*-linux/ascend_toolkit_install.info")
_DRIVER_FILE = Path("/usr/local/Ascend/driver/version.info")
_VERSION = re.compile(r"^[\w.]*version[\w.]*\s*=\s*\[?([^\s\]]+)", re.IGNORECASE | re.MULTILINE)

_RUNS, _RUN_BYTES = 96, 64 << 10  # copies of a batch, and the size of each


def device() -> str:
    """Make the first NPU the current one; every other check of this module needs that."""
    try:
        importlib.import_module("torch_npu")
        npu: Any = importlib.import_module("torch").npu
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        raise CheckFailed(f"torch_npu cannot be imported ({error}); source CANN's set_env.sh") from error
    if not npu.is_available() or not npu.device_count():
        raise CheckFailed("torch_npu sees no device; npu-smi info shows those of the machine")
    npu.set_device(0)
    driver = _version_in(_DRIVER_FILE) or f"unknown: {_DRIVER_FILE} does not say it"
    return (
        f"{npu.device_count()} devices, the first is {npu.get_device_name(0)}; CANN {_cann_version()}; driver {driver}"
    )


def _cann_version() -> str:
    roots = [Path(os.environ[name]) for name in _CANN_ROOTS if os.environ.get(name)]
    for file in (file for root in roots for pattern in _CANN_FILES for file in sorted(root.glob(pattern))):
        if version := _version_in(file):
            return f"{version} ({file})"
    return f"unknown: {' and '.join(_CANN_ROOTS)} name no directory with a version"


def _version_in(file: Path) -> str:
    found = _VERSION.search(file.read_text(errors="replace")) if file.is_file() else None
    return found[1] if found else ""


def runtime_functions() -> str:
    """Check that the functions of CANN's runtime that the connector needs are there."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise CheckFailed(f"{error}; source CANN's set_env.sh") from error
    there = [name for name in acl_abi.PROTOTYPES if hasattr(library, name)]
    missing = [name for name in acl_abi.PROTOTYPES if name not in there]
    text = f"{', '.join(there)}; missing: {', '.join(missing) or 'none'}"
    if set(acl_abi.REQUIRED) & set(missing):
        raise CheckFailed(text)
    return text


def batched_copies() -> str:
    """Copy random bytes to the device and back in shuffled runs, and compare all of them."""
    import torch  # noqa: PLC0415  the program must say why if there is none

    from transfer.copies.batch import device as module  # noqa: PLC0415
    from transfer.copies.batch.backends import Backend, open_copier, pinned_memory  # noqa: PLC0415
    from transfer.copies.batch.base import Direction  # noqa: PLC0415

    size, random, warnings = _RUNS * _RUN_BYTES, np.random.default_rng(), BufferingHandler(_RUNS)
    buffer = torch.empty(size, dtype=torch.uint8, device="npu")
    torch.npu.synchronize()
    memory = pinned_memory(Backend.ACL, 2 * size, buffer.device.index)
    host = bytes_of(memory.region)
    sent, received = host[:size], host[size:]
    sent[:] = random.integers(0, 256, size, np.uint8)
    to, back = random.permutation(_RUNS), random.permutation(_RUNS)
    sizes = np.full(_RUNS, _RUN_BYTES, np.int64)
    runs = np.arange(_RUNS, dtype=np.int64) * _RUN_BYTES
    on_device, on_host = runs + buffer.data_ptr(), runs + memory.region.address
    module.logger.addHandler(warnings)
    try:
        for direction, copies in (
            (Direction.HOST_TO_DEVICE, Copies(on_device[to], on_host, sizes)),
            (Direction.DEVICE_TO_HOST, Copies(on_host[back] + size, on_device[to], sizes)),
        ):
            with closing(open_copier(Backend.ACL, direction, buffer.device.index)) as copier:
                copier.submit(copies).wait(60.0)
    finally:
        module.logger.removeHandler(warnings)
    wrong = int((sent.reshape(_RUNS, -1) != received.reshape(_RUNS, -1)[back]).sum())
    in_place = buffer.cpu().numpy().reshape(_RUNS, -1)[to]
    wrong += int((sent.reshape(_RUNS, -1) != in_place).sum())
    how = warnings.buffer[0].getMessage() if warnings.buffer else "the driver takes batches"
    memory.close()
    text = f"{_RUNS} runs of {_RUN_BYTES} bytes there and back, {wrong} bytes wrong; {how}"
    if wrong:
        raise CheckFailed(text)
    return text


#: None of them needs another; all need ``device``.
CHECKS: tuple[tuple[str, Check], ...] = (("ACL functions", runtime_functions), ("batched copies", batched_copies))
