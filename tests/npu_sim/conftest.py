"""Tests on a simulated Ascend device: the real torch_npu, on a simulated ACL runtime. Run by `make test-npu-sim` only.

They need an environment of their own, because torch does not import where torch_npu is installed without CANN or
something that stands for it. Anywhere else nothing here is collected, and neither torch_npu nor the runtime is loaded.
Nothing that passes here has run on an NPU, and no time taken here says anything about one.
"""

import ctypes
import os
import warnings
from collections.abc import Callable

import pytest

from tests.support.devices import npu_simulator

SIMULATED = os.environ.get("PD_CONNECTOR_NPU_SIM") == "1"

if SIMULATED:
    os.environ["SIMACL_DEVICES"] = "2"
    LIBRARY = npu_simulator.load_runtime()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch_npu, about the CANN that is not there
        import torch  # noqa: F401  imports torch_npu
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    # torch_npu warns once about a memory format that is not used here.
    config.addinivalue_line("filterwarnings", "ignore:Cannot create tensor with internal format:UserWarning")


@pytest.fixture(scope="session")
def acl() -> ctypes.CDLL:
    """The simulated libascendcl."""
    return LIBRARY


@pytest.fixture
def calls(acl: ctypes.CDLL) -> Callable[[str], int]:
    """How often the runtime was called since the test began, by the counter's name in settings.c."""
    acl.simacl_count.restype = ctypes.c_long

    def total(name: str) -> int:
        number = int(acl.simacl_count(name.encode()))
        assert number >= 0, f"there is no counter {name!r}"
        return number

    names = ("copies", "async_copies", "pageable_copies", "batches", "batches_v2", "batch_entries")
    before = {name: total(name) for name in (*names, "event_records", "event_queries", "stream_syncs")}
    return lambda name: total(name) - before[name]
