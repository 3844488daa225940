"""The prefill engine's scheduler half, asked over the real control channel."""

import logging
import threading
from collections.abc import Iterator

import msgspec
import pytest

from layout.geometry import WorkerGeometry
from pd_connector.params import RemotePrefill, check_prompt, contents_digest, parse_remote_prefill, prompt_digest
from pd_connector.scheduler.leases import LeaseTable
from pd_connector.scheduler.producer import Producer
from tests.pd_connector.engines import IDENTITY
from tests.pd_connector.support import FakeRequest, ManualClock, a_prompt
from transfer.control.client import ControlClient
from transfer.control.errors import ControlStartError, PeerRefused
from transfer.control.messages import (
    Cancel,
    Cancelled,
    ErrorCode,
    Hello,
    Release,
    Released,
    Renew,
    Renewed,
    Reply,
    Request,
    Welcome,
)

TTL_S = 30.0
WORKER = WorkerGeometry(0, 1, 0, 1, 4, "10.0.0.5:15000", (), ())


@pytest.fixture
def producer() -> Iterator[Producer[str]]:
    producer: Producer[str] = Producer("127.0.0.1", 0, TTL_S, IDENTITY, 2)
    yield producer
    producer.check_integrity()
    producer.close()
    producer.check_integrity()


@pytest.fixture
def client() -> Iterator[ControlClient]:
    client = ControlClient(retry_s=0.05, retry_cap_s=0.1)
    yield client
    client.close()


def ask(client: ControlClient, producer: Producer[str], message: Request, timeout_s: float = 5.0) -> Reply:
    return client.request("127.0.0.1", producer.port, message, timeout_s).result()


def grant(producer: Producer[str], request_id: str = "r") -> RemotePrefill:
    """A lease, as a decode engine knows it."""
    request = FakeRequest(request_id, a_prompt(70))
    return parse_remote_prefill(producer.finish_prefill(request, ([1, 2, 3, 4, 5],), request_id))


def release(remote: RemotePrefill, reader: int = 0, readers: int = 1) -> Release:
    contents = contents_digest(remote)
    return Release(remote.remote_engine_id, remote.lease_id, reader, readers, "pull", contents)


def test_a_finished_prefill_is_answered_with_params_that_a_decode_engine_accepts(producer: Producer[str]) -> None:
    request = FakeRequest("r", a_prompt(70))
    params = producer.finish_prefill(request, ([1, 2, 3, 4, 5], [0, 0, 8, 9, 6]), "r")
    remote = parse_remote_prefill(params)
    check_prompt(remote, 70, prompt_digest(a_prompt(70), ()))
    assert remote.remote_engine_id == producer.engine_id
    assert remote.remote_request_id == "r"
    assert (remote.remote_host, remote.remote_port) == ("127.0.0.1", producer.port)
    assert remote.remote_block_ids == ((1, 2, 3, 4, 5), (0, 0, 8, 9, 6))
    assert (remote.tp_size, remote.lease_ttl_s) == (2, TTL_S)
    assert producer.leases.active == 1


def test_every_lease_and_every_engine_has_an_id_of_its_own(producer: Producer[str]) -> None:
    assert grant(producer, "a").lease_id != grant(producer, "b").lease_id
    other: Producer[str] = Producer("127.0.0.1", 0, TTL_S, IDENTITY, 2)
    other.close()
    assert other.engine_id != producer.engine_id


def test_a_hello_is_answered_with_the_model_and_all_workers(producer: Producer[str], client: ControlClient) -> None:
    producer.set_workers((WORKER,))
    assert ask(client, producer, Hello(producer.engine_id)) == Welcome(producer.engine_id, IDENTITY, (WORKER,))


def test_an_engine_that_is_still_starting_is_asked_again_until_its_workers_are_known(
    producer: Producer[str], client: ControlClient
) -> None:
    answer = client.request("127.0.0.1", producer.port, Hello(producer.engine_id), 5.0)
    with pytest.raises(PeerRefused, match="still starting"):
        ask(client, producer, Hello(producer.engine_id), timeout_s=1.0)
    assert not answer.done()
    producer.set_workers((WORKER,))
    assert isinstance(answer.result(), Welcome)


@pytest.mark.parametrize(
    "message", [Hello("old"), Renew("old", ("L",)), Release("old", "L", 0, 1, "pull", "c"), Cancel("old", ("L",))]
)
def test_a_message_for_an_engine_that_was_here_before_is_refused_with_both_ids(
    producer: Producer[str], client: ControlClient, message: Request
) -> None:
    with pytest.raises(PeerRefused) as refusal:
        ask(client, producer, message)
    assert refusal.value.code is ErrorCode.UNKNOWN_ENGINE
    for part in ("engine old is not here", producer.engine_id, str(producer.port), "restarted"):
        assert part in str(refusal.value)


def test_a_release_by_every_reader_ends_the_lease(producer: Producer[str], client: ControlClient) -> None:
    remote = grant(producer)
    assert ask(client, producer, release(remote, 0, 2)) == Released(True)
    assert producer.leases.collect() == ()
    assert ask(client, producer, release(remote, 1, 2)) == Released(True)
    assert producer.leases.collect() == ("r",)


def test_a_late_release_is_refused(producer: Producer[str], client: ControlClient) -> None:
    clock = ManualClock()
    producer.leases = LeaseTable(TTL_S, clock)
    remote = grant(producer)
    clock.advance(TTL_S)
    assert ask(client, producer, release(remote)) == Released(False, "expired")
    assert producer.leases.collect() == ("r",)


def test_a_release_of_other_blocks_than_were_leased_is_refused(producer: Producer[str], client: ControlClient) -> None:
    """The block ids have come through a client, who may have put those of somebody else's prompt there."""
    mine, theirs = grant(producer, "mine"), grant(producer, "theirs")
    forged = msgspec.structs.replace(mine, remote_block_ids=((6, 7, 8, 9, 10),))
    assert ask(client, producer, release(forged)) == Released(False, "contents")
    assert producer.leases.collect() == ("mine",)
    assert ask(client, producer, release(theirs)) == Released(True)


def test_a_renewal_names_the_leases_that_are_still_valid(producer: Producer[str], client: ControlClient) -> None:
    ended, valid = grant(producer, "ended").lease_id, grant(producer, "valid").lease_id
    assert ask(client, producer, Cancel(producer.engine_id, (ended, "unknown"))) == Cancelled()
    assert ask(client, producer, Renew(producer.engine_id, (ended, valid))) == Renewed((valid,))
    assert producer.leases.collect() == ("ended",)


def test_the_end_of_a_lease_is_announced_though_no_message_comes() -> None:
    """The scheduler of an idle engine sleeps: somebody has to wake it when blocks can be freed."""
    ended = threading.Event()
    producer: Producer[str] = Producer("127.0.0.1", 0, 0.5, IDENTITY, 1, ended.set)
    grant(producer)
    assert not ended.is_set()
    assert ended.wait(5.0)
    assert producer.leases.collect() == ("r",)
    producer.close()


def test_the_end_of_a_lease_is_announced_with_the_message_that_ends_it(client: ControlClient) -> None:
    announced: list[str] = []
    producer: Producer[str] = Producer("127.0.0.1", 0, TTL_S, IDENTITY, 1, lambda: announced.append("ended"))
    remote = grant(producer)
    ask(client, producer, Renew(producer.engine_id, (remote.lease_id,)))
    assert announced == []
    ask(client, producer, release(remote))
    assert announced == ["ended"]
    producer.close()


def test_a_lease_that_was_not_released_is_mentioned_at_shutdown(caplog: pytest.LogCaptureFixture) -> None:
    before = set(threading.enumerate())
    producer: Producer[str] = Producer("127.0.0.1", 0, TTL_S, IDENTITY, 1)
    grant(producer)
    with caplog.at_level(logging.WARNING):
        producer.close()
    assert "shutting down with 1 leases that were not released" in caplog.text
    assert set(threading.enumerate()) <= before


def test_a_port_that_is_taken_is_refused_by_name(producer: Producer[str]) -> None:
    with pytest.raises(ControlStartError, match=f"127.0.0.1:{producer.port}.*another process holds the port"):
        Producer("127.0.0.1", producer.port, TTL_S, IDENTITY, 1)
