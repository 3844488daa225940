"""A prefix that vLLM has found up to the middle of a block: that block is a copy which the worker is yet to make.

So it is with context parallelism on a model with states, whose blocks of keys and values have more tokens than hashes.
"""

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from pd_connector.params import PromptIdentity
from pd_connector.scheduler.prefill.announcer import Announcer
from pd_connector.scheduler.prefill.transfers import Prompt, Transfers
from pd_connector.vllm.cache_specs import Retention
from pd_connector.vllm.device_blocks import DeviceBlocks
from tests.support.host_tier.setup import STATES, Setup, make_manager, make_request
from tests.support.releases import INSTALLED

SETUP = Setup(groups=((4, 0), (4, STATES)), device_blocks=32)


@pytest.mark.skipif(INSTALLED < (0, 30), reason="context parallelism is served from 0.30 on")
def test_only_whole_blocks_of_a_prefix_that_was_found_are_announced_before_the_first_step() -> None:
    manager = make_manager(SETUP, token_ranks=2, hash_tokens=4)
    blocks, transfers = DeviceBlocks(), Transfers(60.0)
    blocks.bind(manager)
    transfers.set_groups([Retention(8), Retention(4, states=True)], (("a",), ("m",)))
    service: Any = SimpleNamespace(
        transfers=transfers, block_tokens=(8, 4), notify=lambda *names: None,
        begin=lambda request, name: transfers.open(
            Prompt(name, "lease", PromptIdentity(request.num_prompt_tokens, "digest"))
        ),
    )  # fmt: skip
    announcer = Announcer(service, blocks, Counter())

    def compute(name: str, prompt: list[int], ends: tuple[int, ...]) -> int:
        """Schedule steps of a request that end at these tokens; return how many tokens vLLM had found."""
        request = make_request(SETUP, name, prompt)
        request.kv_transfer_params = {"do_remote_decode": True, "transfer_id": name}
        announcer.add(request)
        known, found, *_ = manager.get_computed_blocks(request)
        for start, end in pairwise((found, *ends)):
            manager.new_step_starts()
            new = (found, known) if start == found else ()
            assert manager.allocate_slots(request, end - start, *new) is not None
            request.num_computed_tokens = start
            announcer.schedule({name: end - start})
            request.num_computed_tokens = end
        return int(found)

    assert compute("first", [*range(13)], (4, 8, 12, 13)) == 0
    assert compute("second", [*range(13), 99, 98, 97, 96], (16,)) == 12, "the prefix ends inside a block of 8"
    assert manager.take_kv_cache_block_copies()[0], "the step is to copy that block"
    assert transfers._open["second"].tokens == 8
