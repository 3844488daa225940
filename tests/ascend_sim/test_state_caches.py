"""States as vllm-ascend's model runner lays them out, by its own code, into those of vLLM and its own."""

import pytest

from tests.support.ascend.device_process import on_device
from tests.support.ascend.paths import ascend_release

pytestmark = [
    pytest.mark.ascend_short,
    pytest.mark.skipif(ascend_release() == "0.23", reason="hybrids are refused on vLLM 0.23"),
]


def test_states_arrive_byte_by_byte() -> None:
    """Drafts of unequal length, and pages with padding."""
    on_device(
        """
import pytest
from vllm_ascend.worker.model_runner_v1 import NPUModelRunner
from tests.support.connector.state_caches import MODELS, StateLayout
from tests.support.connector.state_pulls import pull_states

def adjusted(pages, *form):
    return NPUModelRunner._adjust_kv_layout(None, pages.reshape(-1), *form)

pulled = 0
for model in MODELS.values():
    for p_size, d_size in ((1, 1), (2, 1), (3, 2), (1, 4)):
        p = StateLayout(tp=p_size, drafts=3, padding=96, views=adjusted)
        for d in (StateLayout(tp=d_size, drafts=1, padding=32, views=adjusted), StateLayout(tp=d_size)):
            with pytest.MonkeyPatch.context() as patch:
                pulled += pull_states(model, d, p, patch)
assert pulled > 0
"""
    )
