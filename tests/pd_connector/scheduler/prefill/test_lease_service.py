"""What a prefill engine answers for its leases, asked over the real control channel."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file
from vllm.lora.request import LoRARequest

from layout.geometry import WorkerGeometry
from pd_connector.config import ConnectorConfig
from pd_connector.engine_limits import ENGINE_LIMITS
from pd_connector.params import (
    PromptIdentity,
    RemotePrefill,
    check_prompt,
    contents_digest,
    parse_remote_prefill,
    prompt_digest,
)
from pd_connector.scheduler.decode.renewals import Renewals
from pd_connector.scheduler.prefill.lease_service import LeaseService
from pd_connector.scheduler.prefill.leases import LeaseTable
from pd_connector.scheduler.prefill.prefix_service import PrefixService
from pd_connector.vllm.prompts import Prompts
from tests.support.connector.engines import IDENTITY
from tests.support.connector.requests import FakeRequest, a_prompt
from tests.support.layout.oracle import Engine, Model, build
from tests.support.waiting import ManualClock, until
from transfer.control.client import ControlClient
from transfer.control.failures import PeerRefused
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
from transfer.control.peer_sockets import ClientSettings
from transfer.control.server import ControlServer

TTL_S = 30.0
WORKER = WorkerGeometry(0, 1, 0, 1, "10.0.0.5:15000", (), ())


class Endpoint:
    """A lease service on the network; each lease holds the id of its request."""

    def __init__(self, ended: Callable[[], None] = lambda: None, unclaimed_s: float = 0.0) -> None:
        self.clock = ManualClock()
        self.leases: LeaseTable[str] = LeaseTable(TTL_S, self.clock, unclaimed_s=unclaimed_s)
        self.service = LeaseService(self.leases, IDENTITY, 2, ended)
        self._server = ControlServer(self.service, "127.0.0.1")
        self._server.start()

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def engine_id(self) -> str:
        return self.service.engine_id

    def grant(self, request_id: str, block_ids: tuple[list[int], ...] = ([1, 2, 3, 4, 5],)) -> RemotePrefill:
        """A lease, as a decode engine knows it."""
        request = FakeRequest(request_id, a_prompt(70))
        return parse_remote_prefill(self.service.grant(request, block_ids, request_id, ("127.0.0.1", self.port)))

    def close(self) -> None:
        self.service.check_integrity()
        self._server.close()


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with closing(Endpoint()) as endpoint:
        yield endpoint


@pytest.fixture
def client() -> Iterator[ControlClient]:
    client = ControlClient(ClientSettings(retry_s=0.05, retry_cap_s=0.1))
    yield client
    client.close()


def ask(client: ControlClient, endpoint: Endpoint, message: Request, timeout_s: float = 5.0) -> Reply:
    return client.request("127.0.0.1", endpoint.port, message, timeout_s).result()


def release(remote: RemotePrefill, reader: int = 0, readers: int = 1) -> Release:
    contents = contents_digest(remote)
    return Release(remote.remote_engine_id, remote.lease_id, reader, readers, "pull", contents)


@pytest.mark.parametrize("is_named", [False, True])
def test_the_answer_tells_what_the_prompts_adapter_held_when_it_was_loaded(tmp_path: Path, is_named: bool) -> None:
    save_file({"lora_A.weight": np.ones(8, np.float32)}, tmp_path / "adapter_model.safetensors")
    prompts = Prompts(None, "weights")
    leases: LeaseTable[str] = LeaseTable(TTL_S, ManualClock())
    service = LeaseService(leases, IDENTITY, 1, prompts=prompts)
    service.set_workers((WORKER,))
    request: Any = FakeRequest("r", a_prompt(70), lora_request=LoRARequest("french", 1, str(tmp_path)))
    if is_named:
        service.begin(request, "t")
    remote = parse_remote_prefill(service.grant(request, ((1,),), "r", ("127.0.0.1", 1), "t" if is_named else ""))
    assert remote.adapter_digest == prompts.identify(request).adapter_digest != ""
    check_prompt(remote, prompts.identify(request))


def test_a_finished_prefill_is_answered_with_params_that_a_decode_engine_accepts(endpoint: Endpoint) -> None:
    model = Model(kv_heads=2, contents=(1, 1), item_size=1, groups=((0, 3), (1, 2)), windows=(0, 32))
    endpoint.service.set_workers(tuple(rank.geometry for rank in build(model, Engine(tp=2, pp=2), 0, 1 << 44)))
    remote = endpoint.grant("r", ([1, 2, 3, 4, 5], [0, 0, 8, 9, 6]))
    check_prompt(remote, PromptIdentity(70, prompt_digest(a_prompt(70), ())))
    assert remote.remote_engine_id == endpoint.engine_id
    assert remote.remote_request_id == "r"
    assert (remote.remote_host, remote.remote_port) == ("127.0.0.1", endpoint.port)
    assert remote.remote_block_ids == ((1, 2, 3, 4, 5), (0, 0, 8, 9, 6))
    assert remote.remote_layers == (("model.layers.0", "model.layers.3"), ("model.layers.1", "model.layers.2"))
    assert (remote.tp_size, remote.lease_ttl_s) == (2, TTL_S)
    assert endpoint.leases.active == 1


@pytest.mark.parametrize(("window", "named"), [(0, ()), (32, (("model.layers.0", "model.layers.1"),))])
def test_a_single_group_is_named_if_it_does_not_keep_all(
    endpoint: Endpoint, window: int, named: tuple[tuple[str, ...], ...]
) -> None:
    """A decode engine may have others beside it, of which nothing is needed."""
    model = Model(kv_heads=2, contents=(1, 1), item_size=1, groups=((0, 1),), windows=(window,))
    endpoint.service.set_workers(tuple(rank.geometry for rank in build(model, Engine(), 0, 1 << 44)))
    assert endpoint.grant("r").remote_layers == named


def test_every_lease_and_every_engine_has_an_id_of_its_own(endpoint: Endpoint) -> None:
    assert endpoint.grant("a").lease_id != endpoint.grant("b").lease_id
    with closing(Endpoint()) as other:
        assert other.engine_id != endpoint.engine_id


def test_a_hello_is_answered_with_the_model_and_all_workers(endpoint: Endpoint, client: ControlClient) -> None:
    endpoint.service.set_workers((WORKER,))
    assert ask(client, endpoint, Hello(endpoint.engine_id)) == Welcome(endpoint.engine_id, IDENTITY, (WORKER,))


def test_an_engine_that_is_still_starting_is_asked_again_until_its_workers_are_known(
    endpoint: Endpoint, client: ControlClient
) -> None:
    answer = client.request("127.0.0.1", endpoint.port, Hello(endpoint.engine_id), 5.0)
    with pytest.raises(PeerRefused, match="still starting"):
        ask(client, endpoint, Hello(endpoint.engine_id), timeout_s=1.0)
    assert not answer.done()
    endpoint.service.set_workers((WORKER,))
    assert isinstance(answer.result(), Welcome)


def test_workers_that_have_registered_their_caches_anew_are_another_engine(
    endpoint: Endpoint, client: ControlClient
) -> None:
    endpoint.service.set_workers((WORKER,))
    old, lease = endpoint.engine_id, endpoint.grant("r").lease_id
    endpoint.service.set_workers((WORKER,))
    assert endpoint.engine_id != old
    assert endpoint.leases.active == 0
    assert not endpoint.leases.renew([lease])
    with pytest.raises(PeerRefused, match="restarted"):
        ask(client, endpoint, Hello(old))
    assert isinstance(ask(client, endpoint, Hello(endpoint.engine_id)), Welcome)


def test_an_engine_whose_model_has_changed_is_another_one_and_does_not_claim_the_old_weights(
    endpoint: Endpoint, client: ControlClient
) -> None:
    endpoint.service.set_workers((WORKER,))
    old, lease = endpoint.engine_id, endpoint.grant("r").lease_id
    endpoint.service.prefixes = prefixes = create_autospec(PrefixService, instance=True)
    endpoint.service.model_changed()
    prefixes.forget.assert_called_once_with()  # its answers name leases that have ended
    assert endpoint.engine_id != old
    assert not endpoint.leases.renew([lease])
    now = ask(client, endpoint, Hello(endpoint.engine_id))
    assert now == Welcome(endpoint.engine_id, replace(IDENTITY, weights_digest=""), (WORKER,))
    endpoint.service.set_workers((WORKER,), model=IDENTITY)  # of workers that slept meanwhile, and wake up
    now = ask(client, endpoint, Hello(endpoint.engine_id))
    assert now == Welcome(endpoint.engine_id, replace(IDENTITY, weights_digest=""), (WORKER,))


@pytest.mark.parametrize(
    "message", [Hello("old"), Renew("old", ("L",)), Release("old", "L", 0, 1, "pull", "c"), Cancel("old", ("L",))]
)
def test_a_message_for_an_engine_that_was_here_before_is_refused_with_both_ids(
    endpoint: Endpoint, client: ControlClient, message: Request
) -> None:
    with pytest.raises(PeerRefused) as refusal:
        ask(client, endpoint, message)
    assert refusal.value.code == ErrorCode.UNKNOWN_ENGINE
    for part in ("engine old is not here", endpoint.engine_id, str(endpoint.port), "restarted"):
        assert part in str(refusal.value)


def test_a_release_by_every_reader_ends_the_lease(endpoint: Endpoint, client: ControlClient) -> None:
    remote = endpoint.grant("r")
    assert ask(client, endpoint, release(remote, 0, 2)) == Released(True)
    assert endpoint.leases.collect() == ()
    assert ask(client, endpoint, release(remote, 1, 2)) == Released(True)
    assert endpoint.leases.collect() == ("r",)


def test_a_late_release_is_refused(endpoint: Endpoint, client: ControlClient) -> None:
    remote = endpoint.grant("r")
    endpoint.clock.advance(TTL_S)
    assert ask(client, endpoint, release(remote)) == Released(False, "expired")
    assert endpoint.leases.collect() == ("r",)


def test_a_release_of_other_blocks_than_were_leased_is_refused(endpoint: Endpoint, client: ControlClient) -> None:
    """The block ids have come through a client, who may have put those of somebody else's prompt there."""
    mine, theirs = endpoint.grant("mine"), endpoint.grant("theirs")
    forged = msgspec.structs.replace(mine, remote_block_ids=((6, 7, 8, 9, 10),))
    assert ask(client, endpoint, release(forged)) == Released(False, "contents")
    assert endpoint.leases.collect() == ("mine",)
    assert ask(client, endpoint, release(theirs)) == Released(True)


def test_a_renewal_names_the_leases_that_are_still_valid(endpoint: Endpoint, client: ControlClient) -> None:
    ended, valid = endpoint.grant("ended").lease_id, endpoint.grant("valid").lease_id
    assert ask(client, endpoint, Cancel(endpoint.engine_id, (ended, "unknown"))) == Cancelled()
    assert ask(client, endpoint, Renew(endpoint.engine_id, (ended, valid))) == Renewed((valid,))
    assert endpoint.leases.collect() == ("ended",)


def test_the_end_of_a_lease_is_announced_with_the_message_that_ends_it(client: ControlClient) -> None:
    announced: list[str] = []
    with closing(Endpoint(lambda: announced.append("ended"))) as endpoint:
        remote = endpoint.grant("r")
        ask(client, endpoint, Renew(endpoint.engine_id, (remote.lease_id,)))
        assert announced == []
        ask(client, endpoint, release(remote))
        assert announced == ["ended"]


def test_a_request_that_waits_a_minute_for_its_engine_and_one_in_its_queue_keeps_its_lease() -> None:
    """In a burst, a decode server's API process is late by more than a lease lives, and nobody renews it meanwhile."""
    config = ConnectorConfig()
    assert config.lease_ttl_s < 60 < config.claim_timeout_s
    with closing(Endpoint(unclaimed_s=config.claim_timeout_s)) as endpoint:
        remote = endpoint.grant("r")
        endpoint.clock.advance(60.0)
        renewals = Renewals(ControlClient(), ENGINE_LIMITS.handshake_timeout_s, config.queue_timeout_s, endpoint.clock)
        with closing(renewals):
            renewals.keep("r", remote)
            for _ in range(6):
                endpoint.clock.advance(remote.lease_ttl_s / 3)
                renewals.send_due()
                until(lambda: endpoint.leases._active[remote.lease_id].expires_at == endpoint.clock.now + TTL_S)
            assert renewals.lost("r") is None
        assert endpoint.leases.still_valid([remote.lease_id]) == {remote.lease_id}


def test_a_prefix_is_lent_for_no_longer_than_a_lease_that_a_reader_has_asked_for() -> None:
    """Who has found it reads at once. If it dies, decoding engines need the blocks."""
    with closing(Endpoint(unclaimed_s=ConnectorConfig().claim_timeout_s)) as endpoint:
        remote = endpoint.service.lend("blocks", ((1, 2),), 32, ("127.0.0.1", 1), is_written=True)
        endpoint.clock.advance(TTL_S - 1.0)
        assert endpoint.leases.still_valid([remote.lease_id]) == {remote.lease_id}
        endpoint.clock.advance(2.0)
        assert list(endpoint.leases.collect()) == ["blocks"]
