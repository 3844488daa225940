"""Tests of real vllm-ascend on simulated NPUs. Run by `make test-ascend-sim` only, in an environment of their own.

Anywhere else nothing here is collected. Nothing that passes here has run on an NPU: vllm-ascend, torch_npu, vLLM and
the connector are real; the ACL runtime below them is simulated, and kernels are PyTorch's for the CPU.
"""

from pathlib import Path

import pytest

from tests.support.ascend.paths import ascend_release
from tests.support.e2e.choice import put_together
from tests.support.e2e.fixtures import (  # noqa: F401  pytest finds fixtures and hooks here
    acquainted,
    cluster,
    deployed,
    deployment,
    figures,
    pair,
    pytest_runtest_makereport,
    server,
    servers,
)

if not ascend_release():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _libraries() -> None:
    """Bring what is compiled up to date with its sources before a server loads it."""
    from tests.support.ascend.kernel_build import build_all  # noqa: PLC0415  not where nothing is collected

    build_all()


#: Of a test that also starts its servers; each imports torch_npu and vllm-ascend, which takes long on busy cores.
TIMEOUT_S = 1200


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give these tests time, and put those of a deployment together. No others are collected beside them."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    items[:] = put_together(items)
