"""Blocks that vLLM names by a part of their tokens, and host memory.

Covers: pd_connector.vllm.block_pools.
"""

import pytest

from pd_connector.vllm.block_pools import HostBlockPool
from tests.support.host_tier.cases import said
from tests.support.host_tier.setup import CONFIG, Setup, make_manager, make_request
from tests.support.releases import INSTALLED


@pytest.mark.skipif(INSTALLED < (0, 30), reason="vLLM 0.23 names whole blocks only")
def test_a_full_block_that_is_named_by_a_part_of_its_tokens_is_no_candidate() -> None:
    """Of a request that ends before vLLM names the block anew: a step was planned ahead of its last token."""
    setup = Setup(groups=((8, 0), (4, 8)), device_blocks=33, slots=8)
    manager = make_manager(setup, drafts=True)
    pool, request = HostBlockPool(CONFIG, manager, setup.slots), make_request(setup, "r", said(15))
    assert manager.allocate_slots(request, 16)
    request.append_output_token_ids(15)
    assert [candidate is None for candidate in pool.candidates(request, 0, 0, 2)] == [False, True]
