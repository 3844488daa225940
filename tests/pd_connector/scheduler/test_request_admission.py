"""Whoever waits for blocks gets them in the end: vLLM's own schedulers on small pools, with one role and with both."""

from collections import Counter
from typing import Any, Literal

import pytest
from vllm.v1.request import RequestStatus

from pd_connector.orders import Report
from pd_connector.scheduler.request_admission import AdmissionLimits, RequestAdmission
from tests.support.connector.requests import FakeRequest
from tests.support.releases import since
from tests.support.simulation.state_groups import CHECKPOINTS
from tests.support.simulation.vllm_schedulers import ClientRequest, EngineSim, World
from transfer.control.messages import Find, Found
from transfer.control.waiting_requests import NotYet

TTL_S = 30.0  # the default
QUEUE_TIMEOUT_S = 120.0  # the default


def burst(number: int, tokens: int, prefills_on: list[EngineSim], decodes_on: list[EngineSim]) -> list[ClientRequest]:
    """Many different prompts at once, in turns on the engines."""
    all_asked = []
    for index in range(number):
        prompt = [(index * 31 + position) % 500 for position in range(tokens)]
        asked = ClientRequest(f"r{index}", prompt, 5, decodes_on[index % len(decodes_on)])
        prefills_on[index % len(prefills_on)].ask(asked)
        all_asked.append(asked)
    return all_asked


def ends(all_asked: list[ClientRequest]) -> Counter[str]:
    return Counter(asked.ended for asked in all_asked)


# Engines with both roles


def test_a_burst_on_an_engine_with_both_roles_is_answered_without_losing_a_lease(world: World) -> None:
    engine = EngineSim(world, "kv_both", blocks=64)
    asked = burst(20, 100, [engine], [engine])
    world.run(within_s=60)
    assert ends(asked) == {"finished": 20}
    assert engine.counts == {"pulled": 20}


def test_two_engines_with_both_roles_that_serve_each_other_do_not_lock(world: World) -> None:
    a, b = (EngineSim(world, "kv_both", blocks=64) for _ in range(2))
    asked = burst(40, 100, [a, b], [b, a])
    world.run(within_s=60)
    assert ends(asked) == {"finished": 40}
    assert a.counts + b.counts == {"pulled": 40}


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("host_transfers", ["auto", "always"])
def test_with_host_memory_no_lease_gives_way_though_leases_may_hold_all_blocks(
    world: World, engines: int, host_transfers: str
) -> None:
    """Leases move, and prompts land."""
    settings: dict[str, Any] = {"host_transfers": host_transfers, "max_leased_fraction": 1}
    some = [EngineSim(world, "kv_both", blocks=64, slots=400, **settings) for _ in range(engines)]
    asked = burst(20 * engines, 100, some, some[::-1])
    world.run(within_s=TTL_S / 2)
    assert ends(asked) == {"finished": 20 * engines}
    assert [engine.computed for engine in some] == [{}] * engines
    assert [engine.slots_in_use for engine in some] == [0] * engines


def test_whoever_holds_blocks_for_tokens_is_known_to_the_admission_wherever_they_come_from(world: World) -> None:
    """From host memory too: where vLLM does not give them their turn first, others would wait behind nothing."""
    engine = EngineSim(world, "kv_both", blocks=64, slots=400, host_transfers="always", max_leased_fraction=1)
    burst(20, 100, [engine], [engine])
    admission, seen = engine.role_of(RequestAdmission), set[str]()
    for _ in range(1000):
        world.step()
        waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
        held = {request_id for request_id, (_, request) in engine.requests.items() if request.status is waiting}
        assert held <= admission._loading | admission._arrived.keys()
        seen |= held
    assert not engine.requests
    assert len(seen) == 20


def test_an_engine_that_may_lease_all_of_its_blocks_moves_on_when_a_lease_gives_way(world: World) -> None:
    engine = EngineSim(world, "kv_both", blocks=64, max_leased_fraction=1)
    asked = burst(20, 100, [engine], [engine])
    world.run(within_s=4 * TTL_S)
    assert ends(asked) == {"finished": 20}
    assert engine.counts["pulled"] >= 16


def test_a_prompt_larger_than_the_leases_share_is_served(world: World) -> None:
    engine = EngineSim(world, "kv_both", blocks=32)
    asked = burst(3, 400, [engine], [engine])
    world.run(within_s=4 * TTL_S)
    assert ends(asked) == {"finished": 3}


def test_prefixes_that_peers_keep_asking_for_do_not_keep_prompts_for_others_waiting(world: World) -> None:
    """Each of their leases ends soon, but another has begun by then."""
    engine, decode = EngineSim(world, "kv_both", blocks=64, serve_prefixes=True), EngineSim(world, "kv_consumer", 64)
    engine.ask(ClientRequest("popular", list(range(200)), 5))
    (popular,) = engine.requests.values()
    hashes = tuple(bytes(each) for each in popular[1].block_hashes)
    world.run(20.0)
    prefixes = engine.service.prefixes
    assert prefixes is not None
    held: list[str] = []

    def ask(number: int) -> None:
        """Hold the prefix until it is asked for again."""
        question = Find("", str(number), prefixes._hashes.hashing, engine.side._blocks.hash_tokens, hashes)
        answer = prefixes.ask(question, engine.service.engine_id)
        world.step()
        if isinstance(answer, NotYet):
            answer = prefixes.ask(question, engine.service.engine_id)
        engine.service.leases.cancel(held)
        held[:] = [answer.lease_id] if isinstance(answer, Found) and answer.lease_id else []

    ask(0)
    assert engine.leases == 1
    asked = ClientRequest("for another", [7] * 500, 1, decode)
    engine.ask(asked)
    for number in range(1, 400):
        ask(number)
        if number % 20 == 0:
            engine.ask(ClientRequest(f"plain{number}", [number] * 30, 2))
        if asked.ended:
            break
    assert asked.ended == "finished"
    engine.service.leases.cancel(held)
    world.run(30.0)


def test_a_request_that_pulls_nothing_is_not_starved_by_those_that_do(world: World) -> None:
    engine, other = (EngineSim(world, "kv_both", blocks=40) for _ in range(2))
    plain = ClientRequest("plain", list(range(450)), 5)
    pulling = burst(8, 100, [other], [engine])
    engine.ask(plain)
    for number in range(3000):
        if plain.ended:
            break
        if number % 5 == 0:
            pulling += [ClientRequest(f"more{number}", [number] * 100, 20, engine)]
            other.ask(pulling[-1])
        world.step()
    assert plain.ended == "finished"
    world.run(within_s=3 * QUEUE_TIMEOUT_S)
    assert ends(pulling).keys() <= {"finished"}


@pytest.mark.parametrize("scheduling", ["fcfs", "priority"])
def test_a_request_that_finds_no_blocks_does_not_keep_those_that_have_pulled_from_running(
    world: World, scheduling: Literal["fcfs", "priority"]
) -> None:
    """They hold the blocks that it waits for."""
    prefill = EngineSim(world, "kv_producer", blocks=200)
    decode = EngineSim(world, "kv_consumer", blocks=24, pull_s=1.0, scheduling=scheduling)
    asked = burst(3, 100, [prefill], [decode])
    for _ in range(5):
        world.step()
    assert decode.pulling
    urgent = ClientRequest("urgent", list(range(200)), 5, decode, priority=-1)
    prefill.ask(urgent)
    world.run(within_s=TTL_S / 2)
    assert ends([*asked, urgent]) == {"finished": 4}
    assert decode.counts == {"pulled": 4}


def test_a_preempted_prompt_is_not_counted_twice(world: World) -> None:
    engine = EngineSim(world, "kv_both", blocks=64)
    asked = burst(3, 300, [engine], [engine])
    world.step()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    world.run(within_s=60)
    assert ends(asked) == {"finished": 3}
    assert not engine.role_of(RequestAdmission)._prefills


# Engines with one role


def test_a_paused_decode_engine_does_not_starve_the_others(world: World) -> None:
    prefill = EngineSim(world, "kv_producer", blocks=64)
    paused, other = (EngineSim(world, "kv_consumer", blocks=64) for _ in range(2))
    paused.pause(paused=True)
    lost = burst(12, 100, [prefill], [paused])
    while prefill.leases < 9:
        world.step()
    asked = [ClientRequest(f"other{number}", [number] * 100, 5, other) for number in range(6)]
    for each in asked:
        prefill.ask(each)
    start = world.clock.now
    while ends(asked) != {"finished": 6}:
        assert world.clock.now < start + QUEUE_TIMEOUT_S + TTL_S, "starved"
        world.step()
    assert other.counts["pulled"] == 6
    paused.pause(paused=False)
    world.run(within_s=QUEUE_TIMEOUT_S)
    assert ends(lost) == {"finished": 12}


@pytest.mark.parametrize("serve_prefixes", [False, True])
def test_what_has_landed_does_not_wait_for_newer_pulls_on_an_engine_that_computes_no_prompts_for_others(
    world: World, serve_prefixes: bool
) -> None:
    """Its slots are those in which others would land. No pull ends a lease of this engine's, if it serves prefixes."""
    prefill = EngineSim(world, "kv_producer", blocks=800)
    settings: dict[str, Any] = {"host_transfers": "auto", "serve_prefixes": serve_prefixes}
    decode = EngineSim(world, "kv_consumer", blocks=40, slots=40, **settings)
    asked = [ClientRequest(f"r{number}", [number] * 150, 12, decode) for number in range(40)]
    for each in asked:
        prefill.ask(each)
        world.step()
    world.run(within_s=10)
    assert ends(asked) == {"finished": 40}
    assert decode.counts["landed"] > 30


@pytest.mark.parametrize("in_host", [False, True], ids=["computed", "loaded"])
@pytest.mark.parametrize("together", [False, True])
def test_leases_for_a_paused_decode_engine_move_whether_legs_are_sent_in_turn_or_at_once(
    world: World, together: bool, in_host: bool
) -> None:
    """It goes on to follow the prompts that it was asked for, and to renew their leases."""
    prefill = EngineSim(world, "kv_producer", blocks=64, slots=400, host_transfers="auto")
    decode = EngineSim(world, "kv_consumer", blocks=64)
    decode.pause(paused=True)
    for number in range(6 * in_host):
        prefill.ask(ClientRequest(f"before{number}", [number] * 400, 1))
        world.run(within_s=10)
    for number in range(6):
        asked = ClientRequest(f"r{number}", [number] * 400, 3, decode, transfer_id=f"r{number}" if together else "")
        if together:
            decode.ask_by_name(ClientRequest(asked.name, asked.tokens, 3), prefill)
        prefill.ask(asked)
    for _ in range(40):
        world.step()
    assert not prefill.requests, "prompts wait for blocks that leases hold"
    assert any(prefill.computed_of[f"r{number}-p"] < 400 for number in range(6)) == in_host
    decode.pause(paused=False)
    world.run(within_s=10)
    assert decode.counts == {"pulled": 6, "read in host memory": 6}
    assert not prefill.slots_in_use


def test_an_overloaded_decode_engine_loses_no_lease_while_it_moves(world: World) -> None:
    prefill = EngineSim(world, "kv_producer", blocks=200)
    decode = EngineSim(world, "kv_consumer", blocks=16)
    asked = burst(24, 100, [prefill], [decode])
    world.run(within_s=QUEUE_TIMEOUT_S)
    assert ends(asked) == {"finished": 24}
    assert decode.counts == {"pulled": 24}


def test_leases_above_their_share_give_way_at_once(world: World) -> None:
    prefill = EngineSim(world, "kv_producer", blocks=64, max_leased_fraction=0.3)
    paused, other = (EngineSim(world, "kv_consumer", blocks=64) for _ in range(2))
    paused.pause(paused=True)
    burst(8, 100, [prefill], [paused])
    while prefill.leases < 8:
        world.step()
    asked = ClientRequest("other", [3] * 300, 5, other)
    prefill.ask(asked)
    start = world.clock.now
    while not asked.ended:
        assert world.clock.now < start + 5
        world.step()
    assert 0 < prefill.leases < 8, "more gave way than was needed"


def test_a_lease_that_is_being_read_does_not_give_way(world: World) -> None:
    prefill = EngineSim(world, "kv_producer", blocks=30, max_leased_fraction=0.1)
    decode = EngineSim(world, "kv_consumer", blocks=64, pull_s=20.0)
    (read,) = burst(1, 100, [prefill], [decode])
    for _ in range(20):
        world.step()
    assert prefill.leases == 1
    waits = ClientRequest("waits", [3] * 450, 5, decode)
    prefill.ask(waits)
    world.run(within_s=100)
    assert (read.ended, waits.ended) == ("finished", "finished")
    assert decode.counts == {"pulled": 2}


def test_no_lease_gives_way_if_that_helps_nobody(world: World) -> None:
    """A long answer keeps the blocks that a prompt waits for; those of all leases would not do."""
    engine = EngineSim(world, "kv_both", blocks=40, lease_ttl_s=2.0)
    paused = EngineSim(world, "kv_consumer", blocks=40)
    paused.pause(paused=True)
    engine.ask(ClientRequest("long", [1] * 200, 250))
    world.step()
    burst(3, 30, [engine], [paused])
    while engine.leases < 3:
        world.step()
    waits = ClientRequest("waits", [2] * 440, 1)
    engine.ask(waits)
    for _ in range(120):
        world.step()
    assert not waits.ended
    assert engine.leases == 3
    while not waits.ended:
        world.step()


def test_a_lease_gives_way_to_a_request_that_has_pulled_and_needs_another_block(world: World) -> None:
    """vLLM does not ask the connector about it again, and about nobody behind it."""
    source = EngineSim(world, "kv_producer", blocks=40)
    engine = EngineSim(world, "kv_both", blocks=20, pull_s=1.0, max_leased_fraction=1, lease_ttl_s=3.0)
    paused = EngineSim(world, "kv_consumer", blocks=40)
    paused.pause(paused=True)
    pulls = ClientRequest("pulls", [1] * 33, 2, engine)
    source.ask(pulls)
    while not engine.pulling:
        world.step()
    engine.ask(ClientRequest("takes the rest", [2] * 270, 1, paused))
    start = world.clock.now
    while not pulls.ended:
        assert world.clock.now < start + 8, "it stands still until the lease is given up"
        world.step()
    assert pulls.ended == "finished"


# Resets and pauses


def test_a_reset_ends_leases_first(world: World) -> None:
    prefill = EngineSim(world, "kv_producer", blocks=64)
    decode = EngineSim(world, "kv_consumer", blocks=64, pull_s=1.0)
    asked = burst(3, 100, [prefill], [decode])
    while prefill.leases < 3:
        world.step()
    assert prefill.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert prefill.leases == 0
    assert prefill.side._blocks.leased == 0
    prefill.worker.memories.device.clear()
    world.run(within_s=60)
    assert ends(asked) == {"finished": 3}
    assert decode.counts["pulled"] == 0


def test_a_reset_that_fails_for_another_reason_ends_no_lease(world: World) -> None:
    engine, other = EngineSim(world, "kv_both", blocks=64), EngineSim(world, "kv_both", blocks=64, pull_s=5.0)
    asked = burst(2, 100, [engine, other], [other, engine])
    engine.worker.pull_s = 5.0
    while not engine.leases or not engine.worker.pulls:
        world.step()
    with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert engine.leases == 1
    world.run(within_s=60)
    assert ends(asked) == {"finished": 2}


def test_only_what_finds_no_blocks_lets_those_pass_whose_tokens_have_arrived(world: World) -> None:
    """A scheduler may leave one that has arrived aside for long: because of its adapter, or to balance ranks."""
    engine = EngineSim(world, "kv_both", blocks=64)
    demand, leases = engine.role_of(RequestAdmission)._demand, engine.service.leases
    admission = RequestAdmission(AdmissionLimits(0.5, TTL_S, TTL_S), demand, leases, loaded_first=False)
    sizes = {"arrived": 16, "small": 16, "large": 2000}
    arrived, small, large = (FakeRequest(name, list(range(tokens))) for name, tokens in sizes.items())
    admission.awaits_tokens(arrived)
    admission.settled({"arrived"}, set(), Report())
    admission.step_orders({})
    assert [admission.must_wait(each, 0) for each in (small, large)] == [False, True]
    admission.finish(arrived, ())
    assert not admission.must_wait(large, 0)


def test_one_whose_tokens_have_not_come_after_all_does_not_wait_for_itself(world: World) -> None:
    engine = EngineSim(world, "kv_both", blocks=64)
    demand, leases = engine.role_of(RequestAdmission)._demand, engine.service.leases
    admission = RequestAdmission(AdmissionLimits(0.5, TTL_S, TTL_S), demand, leases, loaded_first=False)
    failed, arrived, large = (FakeRequest(name, list(range(2000))) for name in ("failed", "arrived", "large"))
    admission.awaits_tokens(failed)
    admission.settled({"failed"}, {"failed"}, Report())
    admission.step_orders({})
    assert [admission.must_wait(each, 0) for each in (failed, large)] == [False, True]
    admission.awaits_tokens(arrived)
    admission.settled({"arrived"}, set(), Report())
    admission.step_orders({})
    assert admission.must_wait(failed, 0)


# Prompts whose tokens have not come after all


@pytest.mark.parametrize("loaded_first", [False, True])
def test_of_two_that_have_failed_only_the_one_without_blocks_lets_the_other_pass(
    world: World, loaded_first: bool
) -> None:
    engine = EngineSim(world, "kv_both", blocks=64)
    demand, leases = engine.role_of(RequestAdmission)._demand, engine.service.leases
    limits = AdmissionLimits(0.5, TTL_S, TTL_S)
    admission = RequestAdmission(limits, demand, leases, loaded_first=loaded_first)
    one, other, small = (FakeRequest(name, list(range(size))) for name, size in (("a", 2000), ("b", 2000), ("c", 16)))
    for each in (one, other, small):
        admission.awaits_tokens(each)
    admission.settled({"a", "b", "c"}, {"a", "b", "c"}, Report())
    admission.step_orders({})
    assert [admission.must_wait(each, 0) for each in (one, small, other, one)] == [True, False, False, False]
    admission.check_integrity()
    admission.finish(other, ())
    admission.awaits_tokens(other)
    admission.settled({"b"}, set(), Report())
    admission.step_orders({})
    assert [admission.must_wait(each, 0) for each in (one, small)] == [True, False]
    demand.asked(small)
    demand.end_step()
    assert admission.must_wait(small, 0), "vLLM found no blocks for it, whatever was counted"


@since((0, 32), "checkpoints of Mamba2 layers")
@pytest.mark.parametrize("fails", [{"a-d", "b-d"}, {"a-d"}], ids=["both", "the first one"])
def test_failed_prompts_that_take_more_blocks_than_their_pulls_end_though_others_hold_the_rest(
    world: World, fails: set[str]
) -> None:
    """To compute a prompt takes a block more than to pull it, of each cache group: for the state of a checkpoint."""
    states: Any = {"states": "align", "stated": CHECKPOINTS}
    prefill, decode = EngineSim(world, "kv_producer", 120, **states), EngineSim(world, "kv_consumer", 26, **states)
    decode.worker.pull_s = 9.0
    decode.ask(ClientRequest("local", list(range(900, 990)), 20))  # leaves no room for states at borders
    asked = [ClientRequest("a", list(range(188)), 3, decode), ClientRequest("b", list(range(500, 631)), 20, decode)]
    for each in asked:
        prefill.ask(each)
        while f"{each.name}-d" not in decode.worker.pulls:
            world.step()
    while len(decode.requests) > len(asked):
        world.step()
    assert decode.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 0
    for request_id, pull in decode.worker.pulls.items():
        if request_id in fails:
            pull.fails_at = world.clock.now + 1.0
        else:
            pull.ends_at = world.clock.now + 1.0
    world.run(within_s=60)
    assert ends(asked) == {"finished": 2}
    assert decode.counts == {"pulls failed": len(fails), **({"pulled": 1} if len(fails) == 1 else {})}
    assert decode._states.checkpoints
