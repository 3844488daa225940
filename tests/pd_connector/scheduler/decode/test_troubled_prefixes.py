"""Peers that are late or offer too much, and requests left aside: what that costs the engine that asks for prefixes.

Covers: pd_connector.scheduler.decode.prefix_offers.
"""

import socket
from typing import Any
from unittest.mock import create_autospec, patch

import msgspec
import pytest

from pd_connector.scheduler.decode import peer_prefixes
from pd_connector.scheduler.decode.peer_prefixes import PeerPrefixes
from pd_connector.scheduler.readers import Readers
from tests.support.simulation import vllm_schedulers
from tests.support.simulation.prefix_engines import BLOCK, FIRST, TURN, a_holder, asker, compute, hold
from tests.support.simulation.vllm_schedulers import HOST, ClientRequest, EngineSim, World
from tests.support.waiting import until
from transfer.control.client import ControlClient
from transfer.control.messages import Find, Found
from transfer.peers import Address


def test_an_engine_whose_pull_is_late_is_not_asked_again_before_that_has_ended(world: World) -> None:
    """Each late pull has blocks, which nobody would count."""
    holder = a_holder(world)
    finder = asker(world, holder, blocks=100, pull_s=8.0)
    hold(world, holder, FIRST)
    hold(world, holder, [tokens + 300 for tokens in FIRST])
    computed, _ = compute(world, finder, [*FIRST, 1])
    assert (computed, finder.counts["prefixes: asked"]) == (TURN + 1, 1)
    compute(world, finder, [*(tokens + 300 for tokens in FIRST), 1])
    assert finder.counts["prefixes: asked"] == 1
    for _ in range(200):
        world.step()
    assert finder.blocks_in_use == 0
    compute(world, finder, [*range(900, 900 + TURN)])
    assert finder.counts["prefixes: asked"] == 2


@pytest.mark.parametrize("blocks", [40, 60, 80])
def test_a_request_whose_pull_is_late_has_the_blocks_to_be_computed_meanwhile(world: World, blocks: int) -> None:
    """And those behind it. Where the device has no room for both, nothing is pulled."""
    holder = a_holder(world, blocks=120)
    finder = asker(world, holder, blocks=blocks, pull_s=15.0)
    held = list(range(480))
    hold(world, holder, held)
    late, behind = ClientRequest("late", [*held, 1], 1), ClientRequest("behind", list(range(900, 1200)), 1)
    finder.ask(late)
    began = world.clock.now
    while not finder.counts["prefixes: full"] and not finder.worker.prefixes:
        world.step()
    finder.ask(behind)
    while not (late.ended and behind.ended):
        world.step()
        assert world.clock.now < began + 3.0, finder.state


def test_of_several_requests_whose_pulls_are_late_each_can_be_computed(world: World) -> None:
    """In turn: there is room for the longest of them beside all pulls."""
    holder = a_holder(world, blocks=200)
    finder = asker(world, holder, blocks=101, pull_s=15.0)
    prompts = [list(range(start, start + tokens)) for start, tokens in ((0, 480), (1000, 480), (2000, 240))]
    for prompt in prompts:
        hold(world, holder, prompt)
    requests = [ClientRequest(f"r{number}", [*prompt, 1], 1) for number, prompt in enumerate(prompts)]
    began = world.clock.now
    for request in requests:
        finder.ask(request)
    while not all(request.ended for request in requests):
        world.step()
        assert world.clock.now < began + 6.0, finder.state
    assert finder.counts["prefixes: full"] == 1


def test_a_pull_that_takes_longer_than_a_lease_lives_keeps_its_lease(world: World) -> None:
    holder = a_holder(world)
    finder = asker(world, holder, pull_s=50.0)
    hold(world, holder, FIRST)
    compute(world, finder, [*FIRST, 1])
    while finder.worker.prefixes:
        world.step(0.5)
    world.step()
    compute(world, finder, [*range(900, 900 + TURN)])
    assert finder.counts["prefixes: asked"] == 2, "it is left aside as if the pull had failed"
    assert holder.leases == 0


def test_an_engine_that_is_short_of_blocks_does_not_revoke_what_is_being_pulled(world: World) -> None:
    holder = a_holder(world)
    finder = asker(world, holder, pull_s=0.5)
    hold(world, holder, FIRST)
    finder.ask(ClientRequest("r", [*FIRST, 1], 1))
    while not finder.worker.prefixes:
        world.step(0.01)
    for _ in range(3):  # it is told so, unless the pull ends at once
        world.step()
    assert holder.service.leases.revoke_oldest() is None
    world.run(5.0)
    assert finder.counts["prefixes: pulled"] == 1


def test_a_link_that_is_slower_than_computing_costs_one_request_its_wait(world: World) -> None:
    holder = a_holder(world, blocks=400)
    finder = asker(world, holder, blocks=400, pull_s=0.6)
    took = []
    for turn in range(6):
        tokens = [1000 * turn + number for number in range(200)]
        hold(world, holder, tokens)
        finder.side._rate._per_second = 400.0  # what is held takes half a second, and what is new another
        began = world.clock.now
        finder.ask(request := ClientRequest(f"turn {turn}", [*tokens, *[turn] * 200], 1))
        while not request.ended:
            world.step(0.01)
        took.append(world.clock.now - began)
        world.run(0.5)
    assert 0.5 < took[0] < 0.7
    assert max(took[1:]) < 0.1
    told = [finder.counts[name] for name in ("prefixes: late", "prefixes: pulled", "prefix_tokens")]
    assert told == [1, 0, 0]


def test_requests_that_vllm_leaves_aside_do_not_keep_others_from_asking(world: World) -> None:
    """It may, because of their adapters, or admission does."""
    holder = a_holder(world)
    finder = asker(world, holder, blocks=400)
    peers = finder.role_of(PeerPrefixes)
    holder.is_cut = True
    for number in range(17):
        finder.ask(ClientRequest(f"r{number}", [*range(number, number + 150)], 1))
    requests = [finder.requests[f"r{number}-d"][1] for number in range(17)]
    assert all(peers.must_wait(request, 0) for request in requests)
    assert len(peers._asking) == 16
    world.clock.advance(1.5)  # and vLLM has asked for none of them
    holder.is_cut = False
    peers._silent_until.clear()
    assert peers.must_wait(requests[16], 0)
    assert len(peers._asking) == 17
    world.run(60.0)


def test_one_request_finds_out_whether_an_engine_that_was_silent_is_back(world: World) -> None:
    """It may be off for days: every new prompt would wait for it, again and again."""
    finder = asker(world, holder := a_holder(world), blocks=400)
    peers = finder.role_of(PeerPrefixes)
    peers._leave_aside(peers._peers[0])
    holder.is_cut = True

    def waiting(first: int) -> list[bool]:
        for number in range(first, first + 5):
            finder.ask(ClientRequest(f"r{number}", [*range(number, number + 150)], 1))
        requests = [finder.requests[f"r{number}-d"][1] for number in range(first, first + 5)]
        return [peers.must_wait(request, 0) for request in requests]

    world.clock.advance(peer_prefixes._SILENCE_S)
    assert waiting(0) == [True] + [False] * 4
    world.run(5.0)
    for _ in range(60):  # three seconds
        world.step()
    assert waiting(5) == [False] * 5, "it is still silent"
    world.run(5.0)
    world.clock.advance(peer_prefixes._SILENCE_S)
    holder.is_cut = False
    assert waiting(10) == [True] + [False] * 4
    world.run(5.0)
    assert waiting(15) == [True] * 5, "it has answered"
    world.run(60.0)


def test_an_engine_that_was_silent_and_answers_too_late_for_a_short_prompt_is_asked_for_all(world: World) -> None:
    finder = asker(world, a_holder(world))
    peers = finder.role_of(PeerPrefixes)
    peers._leave_aside(peers._peers[0])
    world.clock.advance(peer_prefixes._SILENCE_S)
    finder.side._rate._per_second = 1e5
    ask_and_compute_meanwhile(world, finder)
    compute(world, finder, [*range(900, 900 + TURN)])
    assert finder.counts["prefixes: asked"] == 2


def test_a_short_request_waits_neither_for_a_long_one_that_begins_alike_nor_for_many(world: World) -> None:
    holder = a_holder(world)
    finder = asker(world, holder, blocks=400)
    finder.side._rate._per_second = 100.0
    holder.is_cut = True
    for number in range(15):
        finder.ask(ClientRequest(f"r{number}", [*range(1000 + number, 1400 + number)], 1))
    short = [ClientRequest("alike", FIRST[:60], 1), ClientRequest("other", [*range(900, 960)], 1)]
    for request in (ClientRequest("long", [*FIRST, *FIRST], 1), *short):
        finder.ask(request)
    for _ in range(20):  # a second
        world.step()
    assert [request.ended for request in short] == ["finished"] * 2
    assert finder.computed_of == {"alike-d": 60, "other-d": 60}


def test_hashes_that_name_a_prompt_are_made_once_for_all_peers(world: World) -> None:
    """On the scheduler's thread; of a long prompt it takes milliseconds, and more if they are of other blocks."""
    holders = [a_holder(world) for _ in range(3)]
    for holder in holders:
        hold(world, holder, FIRST)
    finder = asker(world, *holders)
    hashes = finder.role_of(PeerPrefixes)._hashes
    with patch.object(hashes, "of_prompt", wraps=hashes.of_prompt) as made:
        compute(world, finder, [*FIRST, 1])
    world.run(1.0)
    assert [holder.counts["prefixes_served: found"] for holder in holders] == [1, 1, 1]
    made.assert_called_once()


def test_of_peers_that_requests_name_the_newest_are_remembered(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.setattr(peer_prefixes, "_MOST_KNOWN", 2)
    peers = asker(world, a_holder(world)).role_of(PeerPrefixes)
    named = [Address("10.0.0.9", port) for port in (1, 2, 1, 3)]
    for peer in named:
        peers._leave_aside(peer)
    assert [*peers._silent_until] == named[2:]


def ask_and_compute_meanwhile(world: World, finder: EngineSim) -> None:
    """A request asks, and the answer comes when it is computed already."""
    finder.ask(ClientRequest("late", FIRST, 1))
    finder.step()
    world.clock.advance(0.1)
    world.run(5.0)
    for _ in range(3):
        world.step()


def test_a_peer_that_answers_too_late_for_a_short_prompt_is_asked_for_the_next_one(world: World) -> None:
    """It answers with a step of its own; what computing takes 50 ms for may be less."""
    holder = a_holder(world)
    finder = asker(world, holder)
    hold(world, holder, FIRST)
    finder.side._rate._per_second = 1e5
    ask_and_compute_meanwhile(world, finder)
    assert (finder.counts["prefixes: asked"], finder.counts["prefixes: late"]) == (1, 1)
    compute(world, finder, [*range(900, 900 + TURN)])
    assert finder.counts["prefixes: asked"] == 2
    assert holder.leases == 0, "what is not wanted is declined"


def test_a_peer_is_not_asked_while_its_answer_is_late_nor_for_a_while_after_it_has_not_come(world: World) -> None:
    holder = a_holder(world)
    finder = asker(world, holder)
    finder.side._rate._per_second = 1e5
    holder.is_cut = True
    ask_and_compute_meanwhile(world, finder)
    compute(world, finder, [*range(900, 900 + TURN)])
    for _ in range(60):  # three seconds
        world.step()
    for first in (1200, 1500):
        compute(world, finder, [*range(first, first + TURN)])
    assert finder.counts["prefixes: asked"] == 1
    world.clock.advance(peer_prefixes._SILENCE_S)
    compute(world, finder, [*range(1800, 1800 + TURN)])
    assert finder.counts["prefixes: asked"] == 2


def test_an_answer_that_is_looked_at_when_computing_is_faster_is_declined(world: World) -> None:
    holder = a_holder(world)
    finder = asker(world, holder)
    hold(world, holder, FIRST)
    finder.ask(ClientRequest("r", [*FIRST, 1], 1))
    finder.step()
    for _ in range(2):
        world.deliver()
        holder.step()
    assert holder.leases == 1
    world.clock.advance(5.0)  # others fill the steps
    world.run(5.0)
    assert finder.computed_of["r-d"] == TURN + 1
    assert (finder.counts["prefixes: late"], finder.counts["prefixes: pulled"], holder.leases) == (1, 0, 0)


def test_what_a_prefix_extends_is_not_evicted_for_it(world: World) -> None:
    holder = a_holder(world)
    finder = asker(world, holder, blocks=60)
    hold(world, holder, FIRST)
    compute(world, finder, FIRST[:96])
    for first, tokens in ((1000, 432), (2000, 416)):  # all other blocks
        compute(world, finder, [*range(first, first + tokens)])
    finder.side._rate._per_second = 200.0  # so that what is missing is worth asking for
    assert compute(world, finder, [*FIRST, 1])[0] == TURN + 1 - TURN // BLOCK * BLOCK
    assert finder.counts["prefixes: pulled"] == 1
    assert finder.blocks_in_use == 0


@pytest.mark.parametrize("too_many", [1, 1000])
def test_an_offer_of_more_than_was_asked_for_is_declined(
    world: World, too_many: int, caplog: pytest.LogCaptureFixture
) -> None:
    holder = a_holder(world)
    finder = asker(world, holder)
    hold(world, holder, FIRST)
    assert holder.service.prefixes is not None
    ask = holder.service.prefixes.ask

    def exaggerated(find: Find, engine_id: str) -> Any:
        answer = ask(find, engine_id)
        if not isinstance(answer, Found) or not answer.lease_id:
            return answer
        blocks = answer.tokens // 16 + too_many
        return msgspec.structs.replace(answer, tokens=blocks * 16, block_ids=((*answer.block_ids[0], *[1] * too_many),))

    vars(holder.service.prefixes)["ask"] = exaggerated
    computed, _ = compute(world, finder, FIRST)
    assert computed == TURN
    assert f"where {TURN - 1} were asked for" in caplog.text
    world.run(1.0)
    assert not holder.leases


def test_what_lacks_a_block_that_is_needed_here_is_declined_and_the_peer_is_asked_again(world: World) -> None:
    """Of a window, a peer with smaller blocks may hold less than a block here needs."""
    holder = a_holder(world)
    finder = asker(world, holder)
    for first in (0, 300):
        hold(world, holder, [token + first for token in FIRST])
    prefixes = holder.service.prefixes
    answer = prefixes._answer

    def with_a_hole(*asked: Any, **named: Any) -> Found:
        found: Found = answer(*asked, **named)
        assert found.lease_id
        return msgspec.structs.replace(found, block_ids=tuple((0, *ids[1:]) for ids in found.block_ids))

    prefixes._answer = with_a_hole
    assert compute(world, finder, [*FIRST, 1])[0] == TURN + 1
    world.run(1.0)
    assert holder.leases == 0
    prefixes._answer = answer
    assert compute(world, finder, [*(token + 300 for token in FIRST), 1])[0] < TURN
    assert (finder.counts["prefixes: nothing"], finder.counts["prefixes: pulled"]) == (1, 1)


def test_who_has_read_a_prompt_is_looked_for_once_and_forgotten_with_the_request(world: World) -> None:
    """To look takes milliseconds for a long prompt, which may be asked about in every step."""
    finder = asker(world, a_holder(world))
    prefixes, looked = finder.role_of(PeerPrefixes), list[object]()
    prefixes._readers = create_autospec(Readers, instance=True)
    prefixes._readers.reader_of.side_effect = looked.append
    finder.ask(ClientRequest("r", FIRST, 1))
    ((_, request),) = finder.requests.values()
    for _ in range(3):
        prefixes._reader_of(request)
    assert len(looked) == 1
    world.run(5.0)
    assert len(looked) == 1
    assert not prefixes._reader


@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_hint_that_names_a_stranger_leads_nowhere(
    world: World, caplog: pytest.LogCaptureFixture, is_allowed: bool
) -> None:
    """With the real control client, which an engine gets with its own settings."""
    with patch.object(vllm_schedulers, "_Client", lambda world, **given: ControlClient(**given)):
        finder = asker(world, allowed_peers=["127.0.0.0/8" if is_allowed else "192.0.2.7"])
    with socket.create_server((HOST, 0)) as stranger:
        stranger.settimeout(0.2)
        finder.ask(ClientRequest("r", FIRST, 1), {"prefixes_at": f"{HOST}:{stranger.getsockname()[1]}"})
        world.step()
        prefixes: PeerPrefixes = finder.role_of(PeerPrefixes)
        if is_allowed:
            stranger.accept()[0].close()
        else:  # there is an answer, and the request may have it already
            until(lambda: all(answer.done() for each in prefixes._asking.values() for answer in each.asked.values()))
            with pytest.raises(TimeoutError):
                stranger.accept()
    world.run(20.0)
    assert finder.computed_of["r-d"] == TURN
    assert (f"{HOST} may not be contacted: allowed_peers names 192.0.2.7" in caplog.text) == (not is_allowed)
