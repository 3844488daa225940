"""vLLM looks nothing up for requests that wait for peers or the pool, and they go on when there is news, or none comes.

Covers: pd_connector.scheduler.prefix_search.
"""

from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest

from pd_connector.scheduler.decode.landings import Landings
from pd_connector.scheduler.decode.peer_prefixes import PeerPrefixes
from pd_connector.scheduler.host.shared_pool import SharedPool
from pd_connector.scheduler.prefix_search import PrefixQueue, PrefixWork
from tests.support.simulation.prefix_engines import BLOCK, FIRST, TURN, a_holder, asker, compute, hold
from tests.support.simulation.vllm_schedulers import ClientRequest, EngineSim, World

#: What an engine computes of a prompt of a token more than is held elsewhere.
REST = TURN + 1 - TURN // BLOCK * BLOCK


class Peer:
    """Requests wait for another engine."""

    most = 16
    role = PeerPrefixes

    def __init__(self, world: World, **settings: Any) -> None:
        self.world = world
        self.holder = a_holder(world)
        hold(world, self.holder, FIRST)
        self.waits = asker(world, self.holder, blocks=400, **settings)

    def hang(self, *, hangs: bool = True) -> None:
        self.holder.is_cut = hangs

    @property
    def is_bringing(self) -> bool:
        return bool(self.waits.worker.prefixes)


class Pool:
    """Requests wait for the pool."""

    most = 4
    role = SharedPool

    def __init__(self, world: World) -> None:
        self.world = world
        writer, self.waits = (
            EngineSim(world, "kv_producer", 400, slots=400, pooled=True, host_transfers="off") for _ in range(2)
        )
        compute(world, writer, FIRST)
        for _ in range(40):
            world.step()
        assert world.pool.objects

    def hang(self, *, hangs: bool = True) -> None:
        self.world.pool.is_stuck = hangs

    @property
    def is_bringing(self) -> bool:
        return bool(self.waits.role_of(SharedPool)._fetches)


def begun(key: bytes, give_up_at: float) -> PrefixWork:
    """What was begun for a request that lacks this block."""
    return PrefixWork(MagicMock(), 0, key, give_up_at)


Elsewhere = Peer | Pool
both = pytest.mark.parametrize("of", [Peer, Pool])


def look_ups(engine: EngineSim) -> MagicMock:
    """What vLLM's own scheduler looks up from now on."""
    coordinator = engine.scheduler.kv_cache_manager.coordinator
    found = coordinator.find_longest_cache_hit
    watched: MagicMock = patch.object(coordinator, "find_longest_cache_hit", side_effect=found).start()
    return watched


def assert_nothing_is_looked_up(world: World, engine: EngineSim) -> None:
    """For some steps, in which nothing comes."""
    looked_up = look_ups(engine)
    for _ in range(10):
        world.step()
    assert looked_up.call_count == 0


def ask(elsewhere: Elsewhere, prompts: dict[str, list[int]]) -> list[ClientRequest]:
    """Requests come, and what they wait for hangs. Computing them would take some seconds."""
    elsewhere.hang()
    elsewhere.waits.side._rate._per_second = 100.0
    asked = [ClientRequest(name, tokens, 1) for name, tokens in prompts.items()]
    for request in asked:
        elsewhere.waits.ask(request)
    elsewhere.world.step()
    return asked


def others(number: int) -> dict[str, list[int]]:
    """Prompts that have nothing in common, and nobody holds."""
    return {f"other{each}": [*range(1000 * each, 1000 * each + TURN)] for each in range(1, number + 1)}


@both
def test_nothing_is_looked_up_for_those_that_are_asked_for_or_wait_behind_them(
    world: World, of: type[Elsewhere]
) -> None:
    elsewhere = of(world)
    asked = ask(elsewhere, {"first": [*FIRST, 1], "same": [*FIRST, 2], **others(elsewhere.most + 2)})
    assert_nothing_is_looked_up(world, elsewhere.waits)
    assert not any(request.ended for request in asked)
    world.run(20.0)
    assert [request.ended for request in asked] == ["finished"] * len(asked)


def test_nothing_is_looked_up_for_prompts_behind_one_that_leases_hold_back(world: World) -> None:
    engine = EngineSim(world, "kv_both", blocks=64)
    asked = [ClientRequest(f"r{each}", prompt, 1, engine) for each, prompt in enumerate(others(40).values())]
    for request in asked:
        engine.ask(request)
    looked_up, steps = look_ups(engine), 0
    while engine.requests:
        world.step()
        steps += 1
    assert [request.ended for request in asked] == ["finished"] * len(asked)
    assert looked_up.call_count < 2 * steps + 4 * len(asked), "hundreds, if each is looked up in each step"


def test_nothing_is_looked_up_for_choices_behind_one_pull(world: World) -> None:
    prefill, decode = EngineSim(world, "kv_producer", blocks=400), EngineSim(world, "kv_consumer", 400, pull_s=5.0)
    take = decode.ask
    choices: list[ClientRequest] = []

    def take_eight(request: ClientRequest, params: Any = None) -> None:
        choices.extend(replace(request, choice=str(each)) for each in range(8))
        for each in choices:
            take(each, params)

    with patch.object(decode, "ask", take_eight):
        prefill.ask(ClientRequest("r", others(1)["other1"], 1, decode))
        while not decode.requests:
            world.step()
    world.step()
    assert_nothing_is_looked_up(world, decode)
    world.run(30.0)
    assert [each.ended for each in choices] == ["finished"] * 8


@pytest.mark.parametrize("number", [1, 8])
def test_nothing_is_looked_up_for_prompts_that_land(world: World, number: int) -> None:
    prefill = EngineSim(world, "kv_producer", blocks=400)
    decode = EngineSim(world, "kv_consumer", blocks=400, slots=400, host_transfers="always", pull_s=5.0)
    asked = [ClientRequest(f"r{each}", prompt, 1, decode) for each, prompt in enumerate(others(number).values())]
    for request in asked:
        prefill.ask(request)
    while decode.role_of(Landings).under_way < number:
        world.step()
    assert_nothing_is_looked_up(world, decode)
    world.run(20.0)
    assert [request.ended for request in asked] == ["finished"] * number


@both
def test_an_answer_is_taken_in_the_next_step_and_nothing_is_looked_up_until_it_has_come(
    world: World, of: type[Elsewhere]
) -> None:
    elsewhere = of(world)
    ask(elsewhere, {"first": [*FIRST, 1], "same": [*FIRST, 2]})
    elsewhere.hang(hangs=False)
    while not elsewhere.is_bringing:
        world.step(0.01)
    looked_up = look_ups(elsewhere.waits)
    elsewhere.waits.step()
    before = looked_up.call_count
    elsewhere.waits.step()
    assert looked_up.call_count == before
    world.run(20.0)
    computed = elsewhere.waits.computed_of
    assert [computed["first-d"], computed["same-d"]] == [REST, REST]


@both
def test_those_that_wait_are_computed_once_that_would_have_been_faster(world: World, of: type[Elsewhere]) -> None:
    elsewhere = of(world)
    began = world.clock.now
    asked = ask(elsewhere, {"first": FIRST, "same": FIRST, **others(elsewhere.most + 2)})
    world.run(20.0, 0.01)
    assert [request.ended for request in asked] == ["finished"] * len(asked)
    assert 1.9 < world.clock.now - began < 2.5, "200 tokens take 2 s"


@both
@pytest.mark.parametrize("leaves_while", ["asked for", "brought"])
def test_who_waits_behind_a_request_that_leaves_goes_on(world: World, of: type[Elsewhere], leaves_while: str) -> None:
    elsewhere = of(world)
    _, same, _ = ask(elsewhere, {"first": [*FIRST, 1], "same": [*FIRST, 2], "third": [*FIRST, 3]})
    if leaves_while == "brought":
        elsewhere.hang(hangs=False)
        while not elsewhere.is_bringing:
            world.step(0.01)
    elsewhere.waits.abort("first-d")
    elsewhere.hang(hangs=False)
    world.run(2.0)
    assert same.ended == "finished"
    assert [elsewhere.waits.computed_of[f"{name}-d"] for name in ("same", "third")] == [REST, REST]


@both
def test_who_waits_behind_as_many_as_may_goes_on_when_one_of_them_leaves(world: World, of: type[Elsewhere]) -> None:
    elsewhere = of(world)
    ask(elsewhere, others(elsewhere.most + 1))
    queued = f"other{elsewhere.most + 1}-d"
    role = elsewhere.waits.role_of(of.role)
    assert queued not in role._asking
    elsewhere.waits.abort("other1-d")
    world.step()
    assert queued in role._asking
    world.run(20.0)


@both
def test_a_reset_keeps_nobody_waiting(world: World, of: type[Elsewhere]) -> None:
    elsewhere = of(world)
    asked = ask(elsewhere, {"first": [*FIRST, 1], "same": [*FIRST, 2]})
    elsewhere.waits.scheduler.reset_prefix_cache(reset_connector=True)
    world.run(3.0)
    assert [request.ended for request in asked] == ["finished"] * 2


@pytest.mark.parametrize("pull_s", [0.1, 8.0], ids=["in time", "late"])
def test_a_pull_that_ends_or_is_late_ends_the_wait(world: World, pull_s: float) -> None:
    peer = Peer(world, pull_s=pull_s)
    asked = ask(peer, {"first": [*FIRST, 1], "same": [*FIRST, 2]})
    peer.hang(hangs=False)
    world.run(3.0)
    assert [request.ended for request in asked] == ["finished"] * 2
    assert (peer.waits.counts["prefixes: pulled"], peer.waits.counts["prefixes: late"]) == (
        (1, 0) if pull_s < 1 else (0, 1)
    )


def test_nobody_waits_behind_a_pull_that_is_late(world: World) -> None:
    """To compute a longer prompt takes longer than the pull's request waits."""
    peer = Peer(world, pull_s=8.0)
    _, longer = ask(peer, {"first": [*FIRST, 1], "longer": [*FIRST, *range(900, 1200)]})
    peer.hang(hangs=False)
    world.run(3.0)
    assert longer.ended == "finished"


def test_behind_what_is_late_nobody_waits_any_more_and_who_comes_then_looks_himself(world: World) -> None:
    """VLLM may leave the request aside for which it was begun."""
    queue: PrefixQueue[PrefixWork] = PrefixQueue(16, world.clock)
    late = begun(b"a block", world.clock.now + 0.5)
    queue.begin(late)
    assert queue.get(late.key, "waits") is late
    assert queue.wait("waits", world.clock.now + 1.0, late)
    world.clock.advance(0.6)
    assert not queue.is_waiting("waits")
    assert queue.get(late.key, "comes") is None
    assert queue.get(late.key, "waits") is late
    assert not queue.wait("waits", world.clock.now + 1.0, late)
    assert queue.asked == {"waits"}
    queue.check_integrity((), [late])


def test_who_was_asked_for_waits_behind_nobody(world: World) -> None:
    queue: PrefixQueue[PrefixWork] = PrefixQueue(1, world.clock)
    first, next_one = (begun(key, world.clock.now + 5.0) for key in (b"a block", b"another"))
    queue.begin(first)
    assert queue.wait("waits", world.clock.now + 1.0)
    assert queue.is_waiting("waits")
    queue.end(first)
    assert not queue.is_waiting("waits")
    queue.asked.add("waits")
    queue.begin(next_one)
    assert not queue.is_waiting("waits")


def test_beside_other_connectors_those_that_wait_are_looked_up(world: World) -> None:
    """They are asked about the request as well, and would look for what the device has."""

    class MultiConnector:
        def start(self) -> Peer:
            return Peer(world)

    peer = MultiConnector().start()
    ask(peer, {"first": [*FIRST, 1]})
    looked_up = look_ups(peer.waits)
    world.step()
    assert looked_up.call_count == 1
