"""States in prompts that land in host memory: that of the prompt, and that of its last border, for longer prompts."""

from typing import Any

import pytest

from pd_connector.orders import PullOrder, RankEnds, Report
from pd_connector.scheduler.block_demand import BlockDemand
from pd_connector.scheduler.decode.border_states import BorderStates
from pd_connector.scheduler.decode.consumer import Consumer
from pd_connector.scheduler.decode.landings import Landings
from pd_connector.scheduler.host.tier import HostTier
from pd_connector.vllm.block_pools import HostBlockPool
from tests.support.connector.consumers import consumer_parts, layers_of
from tests.support.connector.prompts_with_states import BLOCK, StateEngine
from tests.support.connector.requests import RecordingClient, a_remote
from tests.support.host_tier.setup import CONFIG
from tests.support.releases import INSTALLED, module_needs
from tests.support.waiting import ManualClock

if INSTALLED < (0, 30):
    module_needs((0, 30), "states of recurrent layers")

TOKENS = 22  # of which 21 land: six blocks of keys and values, and the last border is after 20
NEEDED = 6 + 2
RANKS = 2


class LandingOfStates:
    """A decode engine with two groups of states, whose prompts land in host memory."""

    def __init__(self, slots: int = 20, mode: str = "align") -> None:
        self.engine = StateEngine(mode)
        self.pool = HostBlockPool(CONFIG, self.engine.manager, slots)
        self.tier = HostTier(self.pool, RANKS)
        kept = self.engine.retentions
        demand = BlockDemand(self.engine.blocks, kept)
        borders = BorderStates(self.engine.blocks, kept)
        parts = consumer_parts(RecordingClient(), ManualClock(), kept, demand)
        self.consumer = Consumer(*parts._replace(borders=borders))
        self.landings = Landings("always", self.tier, self.consumer, demand, RANKS)
        self.roles = (self.landings, self.tier, self.consumer)

    def arrive(self, name: str, tokens: int) -> Any:
        request = self.engine.request(name, tokens)
        blocks = tuple(range(1, -(-tokens // BLOCK) + 1))
        request.kv_transfer_params = a_remote(
            list(request.prompt_token_ids or ()), lease_id=f"lease-of-{name}", remote_block_ids=(blocks,) * 3,
            remote_block_sizes=(BLOCK,) * 3, remote_layers=layers_of(3),
        ).to_params()  # fmt: skip
        for role in self.roles:
            role.add(request)
        return request

    def land(self, request: Any) -> PullOrder:
        assert self.landings.must_wait(request, 0)
        (order,) = self.landings.step_orders({}).landings
        return order

    def end(self, request: Any, *, failed: bool = False, lacks_states: bool = False) -> None:
        """All ranks report. The last one has something to say, if any has."""
        for is_last in (False, True):
            ends = RankEnds(1, failed and is_last, frozenset({(1, 4)} if lacks_states and is_last else ()))
            for role in self.roles:
                role.settled(set(), set(), Report(landings={request.request_id: ends}))
            self.check()

    def leave(self, request: Any) -> None:
        for role in self.roles:
            role.finish(request, ())
        self.check()

    def check(self) -> None:
        for role in self.roles:
            role.check_integrity()


def entries(order: PullOrder) -> list[list[int]]:
    """Of each block table, the entries that are pulled."""
    return [[entry for entry, block in enumerate(table) if block] for table in order.local_block_ids]


@pytest.mark.parametrize("fault", ["", "failed", "lacks_states", "has_left"])
def test_the_state_of_the_last_border_lands_for_longer_prompts(fault: str) -> None:
    engine = LandingOfStates()
    request = engine.arrive("r", TOKENS)
    order = engine.land(request)
    assert entries(order) == [[0, 1, 2, 3, 4, 5], [4, 5], [4, 5]]
    slots = [block for table in order.local_block_ids for block in table if block]
    assert len({*slots}) == len(slots) == NEEDED + 2
    engine.check()
    if fault == "has_left":
        engine.leave(request)
    engine.end(request, failed=fault == "failed", lacks_states=fault == "lacks_states")
    if fault in ("", "lacks_states"):
        assert engine.tier.missing_tokens(request, 0) == TOKENS - 1
    if fault != "has_left":
        engine.leave(request)
    assert engine.pool.used == 0
    longer = engine.engine.request("longer", TOKENS + 9)
    assert engine.tier.missing_tokens(longer, 0) == (0 if fault else 20)


def test_what_a_longer_prompt_finds_there_is_the_border_and_never_the_running_state() -> None:
    engine = LandingOfStates()
    request = engine.arrive("r", TOKENS)
    order = engine.land(request)
    engine.end(request)
    hit = engine.tier.pool.find(engine.engine.request("longer", TOKENS + 9), 0)
    assert hit is not None
    for group in (1, 2):
        assert [block.block_id for block in hit.groups[group] if not block.is_null] == [order.local_block_ids[group][4]]


def test_its_request_is_loaded_without_the_border() -> None:
    engine = LandingOfStates()
    request = engine.arrive("r", TOKENS)
    order = engine.land(request)
    engine.end(request)
    tokens = engine.tier.missing_tokens(request, 0)
    engine.engine.pull(request)
    blocks = engine.engine.manager.get_blocks("r")
    assert engine.tier.allocated(request, blocks, tokens) == tokens
    (load,) = engine.tier.step_orders({}).loads
    table = order.local_block_ids
    assert load.moves.slots.tolist() == [block - 1 for block in (*table[0], table[1][5], table[2][5])]
    assert load.moves.groups.tolist() == [0] * 6 + [1, 2]


def test_a_ring_is_loaded_behind_what_the_device_holds() -> None:
    """It has one block, at the first place, though vLLM's block size of it is its rows."""
    engine = LandingOfStates(mode="ring")
    request = engine.arrive("r", TOKENS)
    assert engine.landings.must_wait(request, 2 * BLOCK)
    engine.landings.step_orders({})
    engine.end(request)
    tokens = engine.tier.missing_tokens(request, 2 * BLOCK)
    engine.engine.pull(request)
    blocks = engine.engine.manager.get_blocks("r")
    assert engine.tier.allocated(request, blocks, tokens) == tokens
    (load,) = engine.tier.step_orders({}).loads
    assert load.moves.groups.tolist() == [0] * 4 + [1, 2]
    rings = [table[0].block_id for table in blocks.blocks[1:]]
    assert load.moves.blocks.tolist()[4:] == rings


def test_without_slots_for_borders_the_prompt_lands_alone() -> None:
    engine = LandingOfStates(slots=NEEDED + 1)
    order = engine.land(engine.arrive("r", TOKENS))
    assert entries(order) == [[0, 1, 2, 3, 4, 5], [5], [5]]
    engine.check()


@pytest.mark.parametrize("tokens", [5 * BLOCK + 1, BLOCK])
def test_a_prompt_that_ends_at_a_border_or_before_the_first_has_no_other(tokens: int) -> None:
    engine = LandingOfStates()
    order = engine.land(engine.arrive("r", tokens))
    last = -(-(tokens - 1) // BLOCK) - 1
    assert entries(order)[1:] == [[last], [last]]


def test_a_border_that_host_memory_has_is_not_pulled_again() -> None:
    engine = LandingOfStates()
    first = engine.arrive("r", TOKENS)
    engine.land(first)
    engine.end(first)
    again = engine.arrive("again", TOKENS + 1)
    order = engine.land(again)
    assert order.first_token == 20
    assert entries(order)[1:] == [[5], [5]]


def test_what_a_request_has_passed_is_marked_as_used_with_the_rest() -> None:
    """Or the state is evicted first, and with it all that is found by it."""
    engine = LandingOfStates()
    request = engine.engine.request("r", 3 * BLOCK + 1)
    engine.engine.compute(request)
    engine.engine.answer(request, range(BLOCK + 2))
    border = 3 * BLOCK
    assert engine.engine.tables(request)[1][border // BLOCK - 1] == 0
    assert engine.pool.key_at(request, 1, border - BLOCK) in engine.pool.block_keys(request)
