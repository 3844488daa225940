"""Strangers at a prefill server's control port while real pulls go on: no answer changes, nothing grows or is left.

The same junk at a control server of its own, where every frame is counted: ``tests/transfer/control/test_junk.py``.
"""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from tests.support.control.junk import Junk, send_conversations
from tests.support.control.recorder import Recorder
from tests.support.e2e.cluster import Footprint
from tests.support.e2e.deployments import CHAOS, on
from tests.support.e2e.pair import Pair, make_prompt

pytestmark = [
    pytest.mark.security,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    on(CHAOS),
    pytest.mark.parametrize("pair", [("P", "D fail")], indirect=True, ids="-".join),
]

ATTACK_S = 60.0
CONVERSATION_FRAMES = 2000  # of one round
MESSAGES_AT_ONCE = 20  # every 10 ms: less than the server's rate for one host, so that each is looked at
STRANGER = "127.0.0.3"  # another one than those who hold conversations
MAX_GROWTH_MB = 150.0
PROMPTS = 12


@contextlib.contextmanager
def attacked(port: int, recorded: Sequence[bytes]) -> Iterator[Callable[[], bool]]:
    """Two strangers talk to a port for a while; yields whether they still do. Both have ended after the block."""
    until = time.monotonic() + ATTACK_S

    def converse() -> None:
        junk = Junk(11, recorded)
        while time.monotonic() < until:
            send_conversations(port, junk, CONVERSATION_FRAMES)

    def send() -> None:
        junk = Junk(12)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://{STRANGER}:0;127.0.0.1:{port}")
        while time.monotonic() < until:
            with contextlib.suppress(zmq.Again):
                for _ in range(MESSAGES_AT_ONCE):
                    dealer.send_multipart(junk.message(), zmq.NOBLOCK)
            with contextlib.suppress(zmq.Again):
                while True:
                    dealer.recv(zmq.NOBLOCK)
            time.sleep(0.01)
        context.destroy(linger=0)

    with ThreadPoolExecutor(2) as strangers:
        talking = [strangers.submit(converse), strangers.submit(send)]
        yield lambda: not all(stranger.done() for stranger in talking)
        for stranger in talking:
            stranger.result()


def recorded_pull(pair: Pair) -> tuple[int, Sequence[bytes]]:
    """The control port of the prefill server, and what the decode server says there in a pull, piece by piece."""
    prompt = make_prompt(300, ("recorded", pair.name, time.monotonic()))
    params = pair.prefill.client.prefill(prompt)
    with Recorder(params["remote_port"]) as recorder:
        assert pair.decode_leg(prompt, {**params, "remote_port": recorder.port}).status == 200
    return int(params["remote_port"]), tuple(recorder.sent)


def test_a_minute_of_junk_at_the_control_port_changes_no_answer(pair: Pair, figures: list[str]) -> None:
    port, recorded = recorded_pull(pair)
    prompts = [make_prompt(random.Random(number).randrange(20, 900), ("junk", number)) for number in range(PROMPTS)]
    expected = [pair.decode.client.compute(prompt) for prompt in prompts]
    salts, lock = iter(range(10**6)), threading.Lock()

    def one(number: int) -> None:
        with lock:
            salt = f"junk {next(salts)}"
        completion = pair.disaggregate(prompts[number], cache_salt=salt)
        assert completion.tokens == expected[number].tokens

    with ThreadPoolExecutor(2) as clients:
        list(clients.map(one, range(PROMPTS)))
        before, pulls = Footprint.of(pair.prefill), 0
        with pair.traffic() as traffic, attacked(port, recorded) as goes_on:
            while goes_on():
                list(clients.map(one, range(PROMPTS)))
                pulls += PROMPTS
    after = Footprint.of(pair.prefill)
    refused = pair.prefill.client.metrics().value("vllm:pd_control_refusals_total")
    figures.append(
        f"junk for {ATTACK_S:.0f} s: {pulls} pulls right, {refused:.0f} frames and connections refused, P's memory "
        f"{before.resident_mb:.0f} to {after.resident_mb:.0f} MB"
    )
    assert refused > 1000
    assert traffic.pulled("pulls") == pulls > PROMPTS
    assert traffic.failures() == 0
    assert (traffic.leases("granted"), traffic.leases("released")) == (pulls, pulls)
    assert after.resident_mb - before.resident_mb < MAX_GROWTH_MB
    assert after.descriptors <= before.descriptors + 8
