"""Heads of NHD caches on a simulated NPU: real tensors, allocator, streams and events of torch_npu.

Kernels run on the host, on their stream, behind the copy of their row numbers, which takes some time: bytes that nobody
waits for are not there yet.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.support.ascend.servers import simulated_environment

BLOCKS = 4
SHORT = [("paired", 2, 1, 32), ("paired", 2, 1, 4), ("apart", 2, 1, 32), ("apart", 1, 2, 4)]
FORMS = ("paired", "apart", "cross_layer")
EVERY_PAIR = [(form, *sizes, 8) for form in FORMS for sizes in ((2, 1), (1, 2), (4, 2), (2, 4))]

Case = tuple[str, int, int, int]  # form, tensor parallel sizes of P and D, layers


def run(cases: Sequence[Case], *arguments: str, copy_us: int = 2000) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        **dict(simulated_environment()),
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",  # as vllm-ascend has it
        "SIMACL_COPY_US": str(copy_us),
        "OMP_NUM_THREADS": "1",
    }
    named = [",".join(map(str, case)) for case in cases]
    command = [sys.executable, "-m", "tests.support.ascend.transposes", *named, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    "cases",
    [pytest.param(SHORT, marks=pytest.mark.ascend_short, id="short"), pytest.param(EVERY_PAIR, id="every pair")],
)
def test_a_pull_is_right_and_a_window_takes_few_operators(cases: Sequence[Case]) -> None:
    done = run(cases)
    assert done.returncode == 0, done.stderr
    for number, ((form, _, _, layers), pull) in enumerate(
        zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True)
    ):
        per_block = {"paired": layers, "apart": 2 * layers, "cross_layer": 2}[form]
        windows: list[dict[str, int]] = [window for rank in pull["ranks"] for window in rank["operators"]]
        assert pull["copies"] == len(windows), "nothing is copied but the row numbers of each window"
        for window in windows:
            assert 1 + sum(window.values()) <= 6, "with the copy of the row numbers"
            if number == 0:  # later, the allocator puts layers and the buffer into what earlier cases have left
                assert window["index_copy_"] == 1, "all layers are in one segment"
        for rank in pull["ranks"]:
            assert rank["direct"] == 0
            assert rank["descriptors"] <= BLOCKS * per_block


@pytest.mark.ascend_short
def test_a_copier_that_did_not_wait_for_its_event_would_be_noticed() -> None:
    done = run(SHORT[1:2], "early", copy_us=1_000_000)
    assert done.returncode != 0
    assert "bytes of allocation 0 are wrong" in done.stderr
