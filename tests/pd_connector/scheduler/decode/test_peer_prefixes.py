"""Prefixes that another engine holds are found and pulled before a prompt is computed: vLLM's own schedulers."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pd_connector.orders import Cause
from pd_connector.params import RemotePrefill
from pd_connector.scheduler.decode.canaries import Canaries, Standing
from pd_connector.scheduler.decode.legs import Refused
from pd_connector.scheduler.decode.peer_prefixes import PeerPrefixes
from tests.support.simulation.prefix_engines import (
    BLOCK,
    FIRST,
    TURN,
    a_holder,
    asker,
    compute,
    hold,
    take_all_blocks,
    watch_orders,
    watch_places,
)
from tests.support.simulation.state_groups import StateMode
from tests.support.simulation.vllm_schedulers import HOST, ClientRequest, EngineSim, World
from transfer.control.messages import Find, Found

OUTPUTS = 40

with_or_without_states = pytest.mark.parametrize("states", ["", "align"], ids=["tokens", "states"])
SECOND = list(range(TURN, 2 * TURN))


@with_or_without_states
def test_an_engine_pulls_what_another_has_computed_and_computes_the_rest(world: World, states: StateMode) -> None:
    holder = a_holder(world, states=states)
    finder = asker(world, holder, states=states)
    _, conversation = compute(world, holder, FIRST, OUTPUTS)
    computed, _ = compute(world, finder, [*conversation, *range(500, 520)])
    held = (len(conversation) - 1) // BLOCK * BLOCK  # the last token was never computed
    assert computed == len(conversation) + 20 - held
    assert finder.counts["prefixes: pulled"] == holder.counts["prefixes_served: found"] == 1
    world.run(1.0)
    assert holder.leases == 0
    assert finder.blocks_in_use == holder.blocks_in_use == 0


def test_more_than_is_gained_is_not_pulled_again_into_what_host_memory_holds(world: World) -> None:
    """A pull begins where the device ends."""
    holder = a_holder(world, blocks=200)
    finder = asker(world, holder, slots=400)
    compute(world, finder, FIRST)
    orders = watch_orders(finder)
    for gained, pulls in ((TURN // 2, 0), (TURN + BLOCK, 1)):
        tokens = [*FIRST, *[gained] * gained]
        hold(world, holder, tokens)
        take_all_blocks(world, finder)
        finder.side._rate._per_second = 400.0
        compute(world, finder, [*tokens, 1])
        assert len(orders) == pulls


@with_or_without_states
def test_what_this_engine_holds_is_not_pulled(world: World, states: StateMode) -> None:
    holder = a_holder(world, states=states)
    finder = asker(world, holder, states=states)
    compute(world, finder, FIRST)
    hold(world, holder, [*FIRST, *[3] * TURN])
    order = watch_orders(finder)
    computed, _ = compute(world, finder, [*FIRST, *[3] * TURN, 4])
    held, found = TURN // BLOCK * BLOCK, 2 * TURN // BLOCK * BLOCK
    assert computed == 2 * TURN + 1 - found
    assert [(each.first_token, each.end_token) for each in order] == [(held, found)]


@with_or_without_states
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_what_only_host_memory_holds_is_pulled_from_there(world: World, role: str, states: StateMode) -> None:
    holder = a_holder(world, role, 40 if states else 30, slots=200, states=states, host_transfers="auto")
    finder = asker(world, holder, states=states)
    hold(world, holder, FIRST)
    take_all_blocks(world, holder)
    computed, _ = compute(world, finder, [*FIRST, 1])
    assert computed == TURN + 1 - TURN // BLOCK * BLOCK
    assert finder.counts["prefixes: pulled"] == 1
    world.run(1.0)
    assert holder.leases == holder.slots_in_use == holder.blocks_in_use == 0


def test_the_device_is_read_where_host_memory_holds_no_more(world: World) -> None:
    holder = a_holder(world, blocks=30, slots=200, host_transfers="auto")
    finder = asker(world, holder)
    hold(world, holder, FIRST)
    places = watch_places(holder)
    compute(world, finder, [*FIRST, 1])
    assert places == ["device"]
    take_all_blocks(world, holder)
    compute(world, asker(world, holder), [*FIRST, 1])
    assert places == ["device", "host"]


@pytest.mark.parametrize("settings", [{}, {"host_transfers": "auto", "verify": True}])
def test_host_memory_that_cannot_be_read_or_has_no_checksums_is_not_lent(
    world: World, settings: dict[str, Any]
) -> None:
    holder = a_holder(world, blocks=30, slots=200, **settings)
    finder = asker(world, holder)
    hold(world, holder, FIRST)
    take_all_blocks(world, holder)
    computed, _ = compute(world, finder, [*FIRST, 1])
    assert computed == TURN + 1
    assert finder.counts["prefixes: nothing"] == 1


def test_host_memory_that_is_forgotten_while_it_is_lent_fails_the_pull_and_nothing_else(world: World) -> None:
    holder = a_holder(world, blocks=30, slots=200, host_transfers="auto")
    finder = asker(world, holder, pull_s=0.5)
    hold(world, holder, FIRST)
    take_all_blocks(world, holder)
    request = ClientRequest("late", [*FIRST, 1], 1)
    finder.ask(request)
    while not holder.leases:
        world.step()
    holder.scheduler.reset_prefix_cache(reset_connector=True)
    world.run(20.0)
    assert request.ended == "finished"
    assert finder.computed_of["late-d"] == TURN + 1
    assert holder.leases == holder.slots_in_use == 0


def test_an_engine_that_pauses_between_prompts_knows_how_fast_it_computes_them(world: World) -> None:
    finder = asker(world, a_holder(world))
    end_step = finder.end_step

    def computed(output: Any, result: Any) -> None:
        world.clock.advance(0.1)
        end_step(output, result)

    vars(finder)["end_step"] = computed
    for part in range(3):
        compute(world, finder, [3000 + part] * 256)
        world.clock.advance(60.0)
    assert finder.role_of(PeerPrefixes)._rate.seconds_for(2560) == pytest.approx(1.0, rel=0.05)


def test_a_request_that_is_computed_again_behind_its_first_token_says_nothing_of_the_pace(world: World) -> None:
    peers = asker(world).role_of(PeerPrefixes)
    request: Any = SimpleNamespace(request_id="preempted", num_output_tokens=1)
    peers.allocated(request, None, 0)
    peers.step_orders({"preempted": 400})
    world.clock.advance(5.0)
    peers.finish(request, ())
    assert peers._rate.seconds_for(10_000) == 1.0  # as if nothing had been computed


@pytest.mark.parametrize(("step_s", "pulled"), [(0.05, 0), (1.0, 112)], ids=["fast", "slow"])
def test_what_is_computed_at_once_is_not_asked_for(world: World, step_s: float, pulled: int) -> None:
    holder = a_holder(world)
    finder = asker(world, holder)
    finder.ask(ClientRequest("to be timed", [3] * 400, 1))
    world.run(20.0, step_s)
    hold(world, holder, FIRST[:120])
    computed, _ = compute(world, finder, FIRST)
    assert computed == TURN - pulled
    assert (finder.counts["prefixes: asked"], finder.counts["prefixes: pulled"]) == (2, bool(pulled))
    world.run(1.0)
    assert not holder.leases


def test_two_requests_with_one_prefix_pull_it_once(world: World) -> None:
    holder = a_holder(world)
    finder = asker(world, holder)
    hold(world, holder, FIRST)
    requests = [ClientRequest(name, [*FIRST, number], 1) for number, name in enumerate("ab")]
    for request in requests:
        finder.ask(request)
    world.run(20.0)
    assert finder.counts["prefixes: pulled"] == finder.counts["prefixes: asked"] == 1
    assert finder.computed_of["a-d"] == finder.computed_of["b-d"] == TURN + 1 - TURN // BLOCK * BLOCK


def test_the_engine_that_holds_most_is_pulled_from_and_the_others_keep_nothing(world: World) -> None:
    less, more = a_holder(world), a_holder(world, "kv_producer")
    finder = asker(world, less, more)
    hold(world, less, FIRST)
    hold(world, more, [*FIRST, *[3] * TURN])
    computed, _ = compute(world, finder, [*FIRST, *[3] * TURN, 4])
    assert computed == 2 * TURN + 1 - 2 * TURN // BLOCK * BLOCK
    world.run(1.0)
    assert not less.leases
    assert not more.leases


def test_a_request_names_the_engine_that_is_asked_alone(world: World) -> None:
    named, listed = a_holder(world), a_holder(world)
    finder = asker(world, listed)
    hold(world, named, FIRST)
    computed, _ = compute(world, finder, [*FIRST, 1], prefixes_at=f"{HOST}:{named.port}")
    assert computed == TURN + 1 - TURN // BLOCK * BLOCK
    assert not listed.counts


def test_serving_prefixes_makes_no_prefill_engine_of_a_decode_engine(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    holder = a_holder(world)
    compute(world, holder, FIRST, do_remote_decode=True)
    assert "needs kv_role kv_producer or kv_both" in caplog.text
    assert holder.answers == {"r0-d": None}
    assert not holder.leases


@pytest.mark.parametrize("asks", [True, False])
def test_a_decode_leg_is_told_where_its_conversation_can_be_found_if_it_asks(world: World, asks: bool) -> None:
    prefill, decode = EngineSim(world, "kv_producer", 60), a_holder(world)
    request = ClientRequest("r", FIRST, 1)
    decode.ask_by_name(request, prefill, **({"prefixes_at": None} if asks else {}))
    prefill.ask(ClientRequest("r", FIRST, 1, decode, transfer_id="r"))
    world.run(20.0)
    assert decode.answers == {"r-d": {"prefixes_at": f"{HOST}:{decode.port}"} if asks else None}


@pytest.mark.parametrize("hint", ["here", 7, f"{HOST}:0", "[::1", ""])
def test_a_hint_that_is_no_address_costs_nothing(world: World, hint: object, caplog: pytest.LogCaptureFixture) -> None:
    finder = asker(world)
    computed, _ = compute(world, finder, FIRST, prefixes_at=hint)
    assert computed == TURN
    assert "prefixes_at" in caplog.text
    assert not finder.computed, "it is no request of an unknown contract"


def test_an_engine_without_the_setting_says_so(world: World, caplog: pytest.LogCaptureFixture) -> None:
    silent = EngineSim(world, "kv_producer", 60)
    finder = asker(world, silent)
    hold(world, silent, FIRST)
    computed, _ = compute(world, finder, FIRST)
    assert computed == TURN
    assert "serve_prefixes" in caplog.text


def test_an_engine_that_names_blocks_otherwise_says_so(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = a_holder(world)
    finder = asker(world, holder)
    monkeypatch.setitem(vars(holder.side._hashes), "hashing", "sha256:another")
    hold(world, holder, FIRST)
    computed, _ = compute(world, finder, FIRST)
    assert computed == TURN
    assert "PYTHONHASHSEED" in caplog.text


def test_what_a_step_under_way_writes_is_not_offered(world: World) -> None:
    """vLLM lets it be found when it is scheduled."""
    holder = a_holder(world)
    finder = asker(world, holder)
    holder.ask(ClientRequest("first", FIRST, 1))
    begun = holder.begin_step()
    assert begun is not None
    finder.ask(ClientRequest("second", [*FIRST, 1], 1))
    for _ in range(3):
        finder.step()
        world.deliver()
        assert holder.begin_step() is None or not holder.leases
    holder.end_step(*begun)
    world.run(20.0)


@pytest.mark.parametrize("leaves", ["asking", "pulling"])
def test_a_request_that_leaves_keeps_nothing(world: World, leaves: str) -> None:
    holder = a_holder(world)
    finder = asker(world, holder)
    hold(world, holder, FIRST)
    finder.ask(ClientRequest("r", [*FIRST, 1], 1))
    prefixes = finder.role_of(PeerPrefixes)
    while not (prefixes._asking if leaves == "asking" else finder.worker.prefixes):
        world.step(0.01)
    finder.abort("r-d")
    world.run(5.0)
    for _ in range(20):
        world.step()
    assert not holder.leases
    assert finder.blocks_in_use == holder.blocks_in_use == 0


def test_what_is_pulled_while_the_cache_is_reset_is_not_found(world: World) -> None:
    holder = a_holder(world)
    finder = asker(world, holder)
    hold(world, holder, FIRST)
    finder.ask(ClientRequest("r", [*FIRST, 1], 1))
    while not finder.worker.prefixes:
        world.step(0.01)
    finder.side.reset()
    world.run(5.0)
    assert finder.computed_of["r-d"] == TURN + 1
    assert finder.counts["prefixes: failed"] == 1


def test_what_does_not_arrive_is_computed_and_not_found(world: World) -> None:
    holder = a_holder(world)
    finder = asker(world, holder)
    hold(world, holder, FIRST)
    finder.ask(ClientRequest("r", [*FIRST, 1], 1))
    while not finder.worker.prefixes:
        world.step(0.01)
    holder.side.model_changed("a test")  # its leases end
    world.run(5.0)
    assert finder.computed_of["r-d"] == TURN + 1
    assert finder.counts["prefixes: failed"] == 1
    assert not finder.blocks_in_use


def test_what_is_lent_is_not_evicted_before_it_is_read(world: World) -> None:
    holder = a_holder(world, blocks=40)
    finder = asker(world, holder, pull_s=3.0)
    hold(world, holder, FIRST)
    orders = watch_orders(finder)
    finder.ask(ClientRequest("r", [*FIRST, 1], 1))
    while not orders:
        world.step(0.01)
    for number in range(3):  # one of them at a time finds blocks enough
        holder.ask(ClientRequest(f"other {number}", [*range(300 + number, 700 + number)], 1))
    pool, lent = holder.scheduler.kv_cache_manager.block_pool, orders[0].remote.remote_block_ids[0]
    while finder.worker.prefixes:
        world.step()
        assert not holder.leases or all(pool.blocks[block].ref_cnt for block in lent)
    compute(world, finder, [1, 2])
    assert compute(world, finder, [*FIRST, 1])[0] <= BLOCK + 1, "what came late is found"


def test_a_holder_that_lends_everything_under_one_name_loses_no_block_of_ours(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = a_holder(world)
    finder = asker(world, holder)
    hold(world, holder, FIRST)
    hold(world, holder, SECOND)
    handle = holder.service.handle

    def with_one_name(message: Any) -> Any:
        reply = handle(message)
        return msgspec.structs.replace(reply, lease_id="one") if isinstance(reply, Found) and reply.lease_id else reply

    monkeypatch.setattr(holder.service, "handle", with_one_name)
    for name, tokens in (("a", FIRST), ("b", SECOND)):
        finder.ask(ClientRequest(name, [*tokens, 1], 1))
    world.run(60.0)
    for _ in range(20):
        world.step()
    assert finder.blocks_in_use == 0


def asked_by_others(
    monkeypatch: pytest.MonkeyPatch, holder: EngineSim, hash_tokens: Callable[[Find], int]
) -> list[Find]:
    """Let an engine answer that its blocks have another size; return what it is asked."""
    asked: list[Find] = []

    def answer(find: Find) -> Found:
        asked.append(find)
        return Found("engine", find.hashing, hash_tokens(find))

    monkeypatch.setattr(holder.service, "handle", answer)
    return asked


def test_an_engine_with_other_blocks_is_asked_again_by_hashes_of_these(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That what is found is right is shown with servers, whose blocks differ."""
    holder = a_holder(world)
    finder = asker(world, holder)
    asked = asked_by_others(monkeypatch, holder, lambda find: 8)
    for name, tokens in (("a", FIRST), ("b", SECOND)):
        finder.ask(ClientRequest(name, tokens, 1))
        world.run(20.0)
    assert [find.hash_tokens for find in asked] == [16, 8, 8], "what is known of it is remembered"
    assert [len(find.hashes) for find in asked] == [(TURN - 1) // 16, (TURN - 1) // 8, (TURN - 1) // 8]


def test_an_engine_that_says_another_size_each_time_is_asked_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time, the whole prompt is hashed."""
    holder = a_holder(world)
    finder = asker(world, holder)
    asked = asked_by_others(monkeypatch, holder, lambda find: 4 if find.hash_tokens == 8 else 8)
    finder.ask(ClientRequest("a", FIRST, 1))
    world.run(20.0)
    assert [find.hash_tokens for find in asked] == [16, 8]


def test_sixteen_requests_are_asked_for_at_a_time(world: World) -> None:
    holder = a_holder(world)
    finder = asker(world, holder, blocks=400)
    holder.is_cut = True
    for number in range(20):
        finder.ask(ClientRequest(f"r{number}", [*range(number, number + 150)], 1))
    for _ in range(3):
        world.step(0.01)
    assert len(finder.role_of(PeerPrefixes)._asking) == 16
    world.run(60.0)


def test_a_holder_that_is_short_of_blocks_lends_none(world: World) -> None:
    holder = a_holder(world, blocks=27)
    finder = asker(world, holder)
    hold(world, holder, FIRST)
    holder.ask(ClientRequest("running", [*range(300, 515)], 60))
    world.step()
    world.step()
    finder.ask(ClientRequest("r", [*FIRST, 1], 1))
    world.run(60.0)
    assert finder.computed_of["r-d"] == TURN + 1
    assert not holder.counts["prefixes_served: found"]


def test_nobody_waits_long_for_an_engine_that_does_not_answer(world: World) -> None:
    holder = a_holder(world)
    finder = asker(world, holder)
    hold(world, holder, FIRST)
    holder.is_cut = True
    begun = world.clock.now
    computed, _ = compute(world, finder, FIRST)
    assert computed == TURN
    assert world.clock.now - begun < 2.0
    assert finder.counts["prefixes: late"] == 1
    holder.is_cut = False
    compute(world, finder, [*range(300, 300 + TURN)])
    assert finder.counts["prefixes: asked"] == 1, "it is not asked again so soon"


def test_decode_legs_and_prompts_that_must_be_computed_are_not_asked_for(world: World) -> None:
    holder = a_holder(world)
    finder = asker(world, holder, role="kv_both")
    hold(world, holder, FIRST)
    finder.ask(ClientRequest("r", FIRST, 1, sampling={"prompt_logprobs": 1}))
    world.run(20.0)
    assert not finder.counts


def test_prompts_for_adapters_are_not_asked_for(world: World) -> None:
    """Engines may have different ones of one name, and their blocks have the same hashes."""
    holder = a_holder(world)
    finder = asker(world, holder, role="kv_both")
    hold(world, holder, FIRST)
    with_adapter: Any = SimpleNamespace(
        request_id="r", num_prompt_tokens=len(FIRST), lora_request=SimpleNamespace(), kv_transfer_params=None
    )
    prefixes = finder.role_of(PeerPrefixes)
    assert not prefixes.must_wait(with_adapter, 0)
    assert not finder.counts


class ScriptedCanaries(Canaries):
    """Says of every engine what the test says, and remembers what is to prove it."""

    def __init__(self, standing: Standing | Refused) -> None:
        self.standing = standing
        self.begun: list[tuple[str, int, int]] = []  # request, tokens of the prompt there, and here already

    def look(self, request: Any, remote: RemotePrefill) -> Standing | Refused:
        return self.standing

    def begin(self, request: Any, remote: RemotePrefill, computed_tokens: int, **known: Any) -> bool:
        assert known == {"is_same_prompt": True, "is_decode_leg": False}
        self.begun.append((request.request_id, remote.remote_num_tokens, computed_tokens))
        return True


def test_the_first_prompt_that_an_engine_holds_proves_it_and_is_computed(world: World) -> None:
    holder = a_holder(world)
    finder = asker(world, holder)
    hold(world, holder, FIRST)
    canaries = finder.role_of(PeerPrefixes)._canaries = ScriptedCanaries(Standing.UNTRIED)
    computed, _ = compute(world, finder, [*FIRST, 1])
    assert computed == TURN + 1
    (begun,) = canaries.begun
    assert begun[1:] == (TURN // BLOCK * BLOCK + 1, 0)
    assert holder.leases == 1, "it is read, and released, by the canary"


@pytest.mark.parametrize("standing", [Standing.AWAITED, Refused(Cause.CANARY, "it differs")])
def test_nothing_is_pulled_from_an_engine_that_is_not_proven(world: World, standing: Standing | Refused) -> None:
    holder = a_holder(world)
    finder = asker(world, holder)
    hold(world, holder, FIRST)
    finder.role_of(PeerPrefixes)._canaries = ScriptedCanaries(standing)
    computed, _ = compute(world, finder, [*FIRST, 1])
    assert computed == TURN + 1
    world.run(1.0)
    assert not holder.leases
