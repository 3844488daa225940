"""A decode engine proves a prefill engine by what it is asked, and pulls from it then, by vLLM's own schedulers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pd_connector.orders import PullOrder
from pd_connector.scheduler.decode.consumer import Consumer
from pd_connector.worker import canary
from tests.support.releases import INSTALLED, module_needs
from tests.support.simulation.scheduler_pulls import Peer
from tests.support.simulation.state_groups import DRAFTS
from tests.support.simulation.vllm_schedulers import ClientRequest, EngineSim, World

if INSTALLED < (0, 30):
    module_needs((0, 30), "states of recurrent layers")

#: Tokens of prompts, of which the first ends before the first border of blocks of 16 tokens.
SHORT, LONG = 10, 60


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(canary, "_LEAST_TOKENS", 5)  # as few, beside these blocks, as 16 beside real ones
    world = World()
    yield world
    world.close()


class Pair:
    """A prefill and a decode engine, and a router that sends both legs in turn or ``at_once``."""

    def __init__(self, world: World, mode: Any, *, at_once: bool = False, stated: Any = None) -> None:
        self._world, self._at_once, self._number = world, at_once, 0
        self.prefill = EngineSim(world, "kv_producer", 60, states=mode)
        self.decode = EngineSim(world, "kv_consumer", 60, states=mode, stated=stated or {}, canary="refuse")

    def ask(self, tokens: int) -> None:
        """Send a new prompt of so many tokens."""
        self._number += 1
        name, prompt = f"r{self._number}", list(range(1000 * self._number, 1000 * self._number + tokens))
        if self._at_once:
            self.decode.ask_by_name(ClientRequest(name, prompt, 2), self.prefill)
        transfer_id = name if self._at_once else ""
        self.prefill.ask(ClientRequest(name, prompt, 2, self.decode, transfer_id=transfer_id))

    def pulls(self, tokens: int) -> bool:
        """Whether a new prompt of so many tokens is pulled. If not, D has computed it."""
        pulled, computed = self.decode.counts["pulled"], self.decode.computed_tokens
        self.ask(tokens)
        self._world.run(30.0)
        is_pulled = self.decode.counts["pulled"] > pulled
        assert self.decode.computed_tokens - computed == (2 if is_pulled else tokens + 1)
        return is_pulled

    @property
    def proofs(self) -> int:
        assert not self.decode.computed["unproven"]
        return self.decode.counts["canaries: proven"]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("mode", ["", "none", "align"])
def test_prompts_shorter_than_a_block_are_pulled_once_one_of_them_has_proven_the_engine(
    world: World, mode: str, at_once: bool
) -> None:
    pair = Pair(world, mode, at_once=at_once)
    assert [pair.pulls(SHORT) for _ in range(3)] == [False, True, True]
    assert pair.proofs == 1


@pytest.mark.parametrize("at_once", [False, True])
def test_what_a_short_prompt_has_proven_does_not_hold_for_states_at_borders(world: World, at_once: bool) -> None:
    pair = Pair(world, "align", at_once=at_once)
    lengths = [SHORT, LONG, SHORT, LONG]
    assert [pair.pulls(tokens) for tokens in lengths] == [False, False, True, True]
    assert pair.proofs == 2


@pytest.mark.parametrize("at_once", [False, True])
def test_short_prompts_do_not_wait_for_what_a_longer_one_proves(world: World, at_once: bool) -> None:
    pair = Pair(world, "align", at_once=at_once)
    assert not pair.pulls(SHORT)
    worker, usual_s = pair.decode.worker, pair.decode.worker.pull_s
    worker.pull_s = 15.0
    pair.ask(LONG)
    while not worker.canaries:
        assert pair.decode.requests or pair.prefill.requests, "it has ended, and proves nothing"
        world.step()
    worker.pull_s = usual_s
    pair.ask(SHORT)
    while pair.decode.requests or pair.prefill.requests:
        world.step()
    assert pair.decode.counts["pulled"] == 1
    assert worker.canaries, "it is not proven yet"
    world.run(30.0)


@pytest.mark.parametrize(("mode", "first"), [("align", LONG), ("none", SHORT), ("", SHORT)])
def test_one_proof_is_enough_if_it_has_states_at_a_border_or_none_are_kept(world: World, mode: str, first: int) -> None:
    pair = Pair(world, mode)
    assert [pair.pulls(tokens) for tokens in (first, LONG, SHORT)] == [False, True, True]
    assert pair.proofs == 1


def test_an_engine_with_other_states_is_refused_by_the_first_prompt_that_shows_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(world, "align")
    peer_of = pair.decode._peer_of

    def with_other_states(order: PullOrder) -> Peer:
        peer = peer_of(order)
        states = {block for table in order.remote.remote_block_ids[1:] for block in table}
        device = {place: stamp + (place[0] in states) for place, stamp in peer.memories.device.items()}
        return replace(peer, memories=replace(peer.memories, device=device))

    monkeypatch.setattr(pair.decode, "_peer_of", with_other_states)
    assert not pair.pulls(SHORT)
    assert pair.proofs == 1, "no state of it is compared"
    assert not pair.pulls(LONG)
    assert pair.decode.counts["canaries: differs"] == 1
    assert not pair.pulls(SHORT)
    assert not pair.pulls(LONG)
    assert pair.decode.counts["canary"] == 2, "the cause of both refusals"


@pytest.mark.parametrize("first", [SHORT, LONG])
def test_states_at_borders_come_only_from_an_engine_that_a_prompt_with_one_has_proven(
    world: World, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """An engine that drafts keeps no state at the last border of a prompt; one that does not has it."""
    pair = Pair(world, "align", stated=DRAFTS)
    chosen: list[tuple[int, ...]] = []
    borders = Consumer.borders

    def noted(*parameters: Any, **more: Any) -> tuple[int, ...]:
        chosen.append(borders(*parameters, **more))
        return chosen[-1]

    monkeypatch.setattr(Consumer, "borders", noted)
    assert [pair.pulls(tokens) for tokens in (first, 25)] == [False, True]
    assert chosen == ([()] if first == SHORT else [(16,)])
