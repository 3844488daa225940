"""Prompts that are followed over a bad network, at a prefill engine that restarts, stops or does as it likes.

The control channel is the real one, and so are leases and bytes. P answers at once, though there may be nothing new.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pd_connector.orders import Cause
from pd_connector.worker import pull as pull_module
from pd_connector.worker import remote_reader
from pd_connector.worker.session import PeerSession
from tests.support.connector.chunked_prompts import ChunkedPrompt
from tests.support.connector.engines import IDENTITY, OURS, PREFILL, THEIRS, DecodeWorker, PrefillEngine, Site
from tests.support.control.faulty_network import Direction, FaultyNetwork, chaos, lose_everything
from tests.support.waiting import until
from transfer.control.messages import Follow, TransferState, decode_request
from transfer.control.server import ControlServer


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_reader, "RANGE_S", 0.0)
    monkeypatch.setattr(pull_module, "FOLLOW_WAIT_S", 0.2)
    monkeypatch.setattr(pull_module, "_FOLLOW_PAUSE_S", 0.005)


@dataclass
class FarLegs:
    """A prompt behind a network, and a decode worker that follows it."""

    prefill: PrefillEngine
    prompt: ChunkedPrompt
    worker: DecodeWorker
    network: FaultyNetwork
    session: PeerSession

    def submit(self) -> None:
        self.session.submit(self.prompt.order("r", OURS, remote_port=self.network.port))

    def asked(self, **known: Any) -> Callable[[], bool]:
        """A condition: P has been asked by who knows that much."""
        return lambda: any(
            all(getattr(asked, name) == value for name, value in known.items()) for asked in list(self.prompt.asked)
        )


@pytest.fixture
def start(site: Site) -> Iterator[Callable[..., FarLegs]]:
    with ExitStack() as stack:

        def started(**changes: Any) -> FarLegs:
            prefill, (worker,) = site.prefill(PREFILL), site.decode()
            prompt = ChunkedPrompt(prefill, THEIRS)
            server = ControlServer(prompt, "127.0.0.1")
            server.start()
            site.add(server)
            network = stack.enter_context(FaultyNetwork(server.port))
            known = prompt.remote(remote_port=network.port)
            return FarLegs(prefill, prompt, worker, network, site.session(worker, known, **changes))

        yield started


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
def test_every_byte_arrives_once_whatever_becomes_of_the_messages(start: Callable[..., FarLegs], seed: int) -> None:
    legs, dice = start(handshake_timeout_s=20.0), random.Random(seed)
    legs.network.rule = chaos(seed, lose=0.2, repeat=0.3, longest_delay_s=0.03)
    free = [tuple(dice.sample(range(1, 12), 5)) for _ in range(3)]
    legs.prompt.compute(dice.choice([0, 16]))
    legs.submit()
    while legs.prompt.tokens < 69:
        until(legs.asked(tokens=legs.prompt.tokens, attempt=legs.prompt.attempt))
        if free and dice.random() < 0.3 and legs.prompt.tokens:
            legs.prompt.preempt((free.pop(),))
            legs.prompt.compute(dice.choice([1, 16]))
        else:
            legs.prompt.compute(min(69, legs.prompt.tokens + dice.choice([3, 16, 20])))
    legs.prompt.complete()
    end = legs.worker.next_end()
    assert (end.cause, end.restarts) == ("", legs.prompt.attempt)
    assert legs.worker.holds([(OURS, 0, 69)])
    assert legs.prefill.leases.take_counts() == {"granted": 1, "released": 1}
    until(lambda: legs.session.idle)
    assert legs.worker.ends.empty()


def test_a_prefill_engine_that_has_restarted_refuses_and_the_pull_fails(start: Callable[..., FarLegs]) -> None:
    legs = start()
    legs.prompt.compute(32)
    legs.submit()
    until(legs.asked(tokens=32))
    legs.prefill.service.set_workers(tuple(rank.geometry for rank in legs.prefill.ranks))
    end = legs.worker.next_end()
    assert end.cause == Cause.REFUSED
    assert "unknown_engine" in end.reason


def test_a_prefill_engine_that_falls_silent_fails_the_pull(start: Callable[..., FarLegs]) -> None:
    legs = start(handshake_timeout_s=1.0)
    legs.prompt.compute(32)
    legs.submit()
    until(legs.asked(tokens=32))
    legs.network.rule = lose_everything
    end = legs.worker.next_end()
    assert end.cause == Cause.UNREACHABLE
    assert "did not answer 'follow'" in end.reason


def test_a_pull_of_a_prefill_engine_that_computes_nothing_more_ends_in_time(start: Callable[..., FarLegs]) -> None:
    legs = start(pull_timeout_s=1.0)
    legs.prompt.compute(32)
    legs.submit()
    end = legs.worker.next_end()
    assert end.cause == Cause.TIMEOUT
    assert "its request is 'computing', 32 of 70 prompt tokens are computed" in end.reason


def test_a_pull_that_fails_before_the_prompt_is_complete_cancels_it(start: Callable[..., FarLegs]) -> None:
    legs, sent = start(), list[Any]()

    def eavesdrop(way: Direction, frame: bytes) -> list[tuple[float, bytes]]:
        if way is Direction.REQUEST:
            sent.append(decode_request(frame)[1])
        return [(0.0, frame)]

    legs.network.rule = eavesdrop
    legs.prompt.compute(32)
    legs.submit()
    until(legs.asked(tokens=32))
    legs.prompt.end("out of memory")
    assert legs.worker.next_end().cause == Cause.TRANSFER
    until(lambda: type(sent[-1]).__name__ == "Cancel")
    assert (sent[-1].lease_ids, sent[-1].transfer_ids) == ((), (legs.prompt.transfer_id,))
    follows = [message for message in sent if isinstance(message, Follow)]
    assert {message.state for message in follows} == {TransferState.COMPUTING}


def test_a_transfer_of_another_model_is_refused_with_both_values_and_nothing_is_read(
    start: Callable[..., FarLegs],
) -> None:
    legs = start(model=replace(IDENTITY, weights_digest="d00d"))
    legs.prompt.compute(32)
    legs.submit()
    end = legs.worker.next_end()
    assert end.cause == Cause.INCOMPATIBLE
    assert "weights_digest is 'd00d' here and 'beef' there" in end.reason
    assert legs.worker.untouched
