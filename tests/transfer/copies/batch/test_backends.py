"""The door of the package: the right backend by name, and a clear word where something is missing."""

import ctypes
import subprocess
import sys

import pytest

from transfer.copies.batch import acl
from transfer.copies.batch.backends import Backend, npu_pci_address, open_copier, pinned_memory
from transfer.copies.batch.base import CopierStartError, Direction


def is_installed(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("backend", "library", "way_out"),
    [(Backend.CUDA, "libcuda.so.1", "--gpus all"), (Backend.ACL, "libascendcl.so", "set_env.sh")],
)
def test_a_missing_library_is_named_with_a_way_to_get_it(backend: Backend, library: str, way_out: str) -> None:
    if is_installed(library):
        pytest.skip(f"{library} is installed here")
    for attempt in (lambda: open_copier(backend, Direction.HOST_TO_DEVICE), lambda: pinned_memory(backend, 4096)):
        with pytest.raises(CopierStartError) as caught:
            attempt()
        assert library in str(caught.value)
        assert way_out in str(caught.value)


def test_without_cann_no_npu_has_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acl, "LIBRARY", "libascendcl-of-nobody.so")
    assert npu_pci_address(0) == ""


@pytest.mark.thorough
def test_nothing_of_a_device_is_loaded_by_the_import() -> None:
    code = (
        "import transfer.copies.batch.backends, sys\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert not {'torch', 'torch_npu', 'vllm'} & set(sys.modules)\n"
        "assert 'libcuda' not in maps and 'libascendcl' not in maps"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_host_memory_is_whole_pages_and_needs_no_device() -> None:
    memory = pinned_memory(Backend.HOST, 10_000)
    assert memory.region.size == 10_000
    assert memory.region.address % 4096 == 0
    ctypes.memset(memory.region.address, 1, memory.region.size)
    memory.close()
    memory.close()


def test_memory_must_have_some_bytes() -> None:
    with pytest.raises(ValueError, match="must be positive, not 0 bytes"):
        pinned_memory(Backend.HOST, 0)
