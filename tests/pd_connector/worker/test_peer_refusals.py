"""Engines that cannot be pulled from and params that do not fit them: refused in words, and nothing is read."""

import logging
import threading
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from layout.geometry import ModelIdentity, Region
from pd_connector.recipe_keys import EngineSizes
from pd_connector.worker import session as sessions
from tests.support.connector.engines import (
    DECODE,
    IDENTITY,
    MODEL,
    OURS,
    PREFILL,
    THEIRS,
    Blocks,
    Site,
    an_order,
    pull_once,
)
from tests.support.control.faulty_network import FaultyNetwork, deliver
from tests.support.engine.in_process import InProcessEngine, InProcessLink
from tests.support.layout.oracle import Model
from tests.support.process import free_port
from tests.support.waiting import until
from transfer.control.messages import Welcome
from transfer.engine.interface import ReadFailed

# Peers of which some prompts cannot be had


@pytest.mark.parametrize(
    ("here", "there", "warns"), [(8192, 4096, True), (4096, 4096, False), (4096, 8192, False), (8192, 0, False)]
)
def test_a_prefill_engine_that_takes_shorter_prompts_only_is_warned_of_at_the_first_contact(
    site: Site, caplog: pytest.LogCaptureFixture, here: int, there: int, warns: bool
) -> None:
    prefill, workers = site.prefill(max_model_len=there), site.decode()
    for number, worker in enumerate(workers):
        remote = prefill.prefill(f"r{number}", THEIRS)
        site.session(worker, remote, max_model_len=here).submit(an_order(f"r{number}", remote, OURS))
        assert worker.next_end().cause == ""
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == warns, "one rank says it for all"
    if warns:
        assert (
            f"at 127.0.0.1:{prefill.port} was started with --max-model-len 4096, and this engine with 8192" in said[0]
        )
        assert "max_tokens must be at least 1, got 0" in said[0]
        assert "Start both with the same --max-model-len" in said[0]


@pytest.mark.parametrize(
    ("stated", "layers", "says"),
    [
        (EngineSizes(tp_size=2, pp_size=2, pp_layer_partition="2, 1"), 3, ""),
        (EngineSizes(tp_size=8), 3, "tp_size 8 (found: 2)"),
        (EngineSizes(pp_layer_partition="1,2"), 3, "pp_layer_partition 1,2 (found: 2,1)"),
        (EngineSizes(pp_layer_partition="1,1"), 2, "pp_layer_partition 1,1 (found: 2,0)"),
        (EngineSizes(pp_layer_partition="2,2"), 4, ""),
    ],
    ids=["equal", "size", "partition", "a layer that drafts", "a layer without a cache"],
)
def test_a_prefill_engine_that_is_not_what_a_recipe_says_is_warned_of_once(
    site: Site, caplog: pytest.LogCaptureFixture, stated: EngineSizes, layers: int, says: str
) -> None:
    """Of three layers with caches: the model's, of which one may have none, or one of them drafts."""
    identity = replace(IDENTITY, layers=layers)
    prefill, workers = site.prefill(replace(PREFILL, tp=2, pp=2), identity=identity), site.decode()
    for number, worker in enumerate(workers):
        remote = prefill.prefill(f"r{number}", THEIRS)
        site.session(worker, remote, stated=stated, model=identity).submit(an_order(f"r{number}", remote, OURS))
        assert worker.next_end().cause == ""
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == bool(says)
    assert not says or f"at 127.0.0.1:{prefill.port}: {says}. PDConnector goes by what it" in said[0]


DRAFTING, OTHERWISE = replace(IDENTITY, draft_digest="a"), replace(IDENTITY, draft_digest="b")


@pytest.mark.parametrize(
    ("here", "there", "warns"),
    [
        (DRAFTING, OTHERWISE, True),
        (DRAFTING, DRAFTING, False),
        (IDENTITY, OTHERWISE, False),
        (DRAFTING, IDENTITY, False),
        (replace(DRAFTING, weights_digest=""), OTHERWISE, False),
        (DRAFTING, replace(OTHERWISE, weights_digest=""), False),
    ],
)
def test_a_prefill_engine_that_drafts_by_another_model_is_warned_of_once(
    site: Site, caplog: pytest.LogCaptureFixture, here: ModelIdentity, there: ModelIdentity, warns: bool
) -> None:
    """Not if the weights of one side may have changed since they were read."""
    prefill, workers = site.prefill(identity=there), site.decode()
    for number, worker in enumerate(workers):
        remote = prefill.prefill(f"r{number}", THEIRS)
        site.session(worker, remote, model=here).submit(an_order(f"r{number}", remote, OURS))
        assert worker.next_end().cause == ""
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == warns
    assert not warns or "drafts tokens by another model than this engine (b there, a here)" in said[0]


# Links that cannot be used


def test_a_link_that_the_network_may_have_forgotten_is_opened_anew_before_it_is_read_over(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "LANES", 1)
    prefill, (worker,) = site.prefill(), site.decode()
    remotes = [prefill.prefill(f"r{number}", THEIRS) for number in range(3)]
    session = site.session(worker, remotes[0])
    links: list[set[InProcessLink]] = []
    for number, remote in enumerate(remotes):
        session.submit(an_order(f"r{number}", remote, OURS))
        assert worker.next_end().cause == ""
        links.append(set(worker.engine._links))
        for link in links[-1] if number else ():
            link.is_forgotten = True
    assert links[0] == links[1]
    assert len(links[2] - links[1]) == 1
    assert [link.closed for link in (*links[1], *(links[2] - links[1]))] == [True, False]


# Peers that cannot be used


def test_an_unreachable_engine_fails_what_is_queued_behind_at_once(site: Site) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    worker.handshake_timeout_s = 0.3
    port = free_port()
    remote = prefill.prefill("r", THEIRS)
    orders = [an_order(f"r{number}", remote, OURS, remote_port=port) for number in range(5)]
    session = site.session(worker, orders[0].remote)
    for order in orders:
        session.submit(order)
    ends = [worker.next_end() for _ in orders]
    assert [end.request_id for end in ends] == ["r0", "r1", "r2", "r3", "r4"]
    assert {end.cause for end in ends} == {"unreachable"}
    assert all(f"127.0.0.1:{port} did not answer 'hello'" in end.reason for end in ends)
    assert worker.client.counters.requests == 1  # they did not wait for a handshake each
    until(lambda: session.idle)


def test_an_engine_that_has_come_back_is_pulled_from_again(site: Site) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    worker.handshake_timeout_s = 1.0
    with FaultyNetwork(prefill.port, lambda direction, frame: []) as network:
        first, second = prefill.prefill("r1", THEIRS), prefill.prefill("r2", THEIRS)
        order = an_order("r1", first, OURS, remote_port=network.port)
        session = site.session(worker, order.remote)
        session.submit(order)
        assert worker.next_end().cause == "unreachable"
        network.rule = deliver
        session.submit(an_order("r2", second, OURS, remote_port=network.port))
        assert worker.next_end().cause == ""
    assert worker.holds([(OURS, 0, 69)])


def test_an_engine_that_restarted_at_the_same_port_refuses_the_old_params(site: Site) -> None:
    old = site.prefill()
    remote = old.prefill("r", THEIRS)
    old.close()
    new = site.prefill(port=remote.remote_port)
    worker = site.decode()[0]
    end = pull_once(site, remote, worker)
    assert end.cause == "refused"
    for part in (remote.remote_engine_id, new.service.engine_id, "has restarted"):
        assert part in end.reason
    assert site.fabric.reads == 0
    assert worker.untouched


def test_an_engine_with_another_transport_is_incompatible_and_not_contacted(site: Site) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    (rank,) = prefill.ranks
    prefill.service._workers = (replace(rank.geometry, transport="rdma"),)
    worker.rank = replace(worker.rank, geometry=replace(worker.rank.geometry, transport="tcp"))
    end = pull_once(site, prefill.prefill("r", THEIRS), worker)
    assert end.cause == "incompatible"
    assert "protocol is 'tcp' here and 'rdma' on the remote engine" in end.reason
    assert site.fabric.reads == 0
    assert worker.untouched


def test_an_engine_whose_transfer_port_is_closed_is_unreachable(site: Site) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    prefill.engines[0].close()
    end = pull_once(site, prefill.prefill("r", THEIRS), worker)
    assert end.cause == "unreachable"
    assert f"cannot reach the transfer engine at {prefill.engines[0].address}" in end.reason
    until(lambda: prefill.leases.collect() == ("r",), "it answers, so it is told")


def test_pulls_behind_one_that_found_no_transfer_engine_free_their_blocks_at_once_too(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    remotes = [prefill.prefill(f"r{number}", THEIRS) for number in range(4)]
    session, opening, go_on = site.session(worker, remotes[0]), threading.Event(), threading.Event()

    def refuse(engine: InProcessEngine, address: str, *_: object) -> InProcessLink:
        opening.set()
        assert go_on.wait(10.0)
        raise ReadFailed(f"cannot reach the transfer engine at {address}", settled=True)

    monkeypatch.setattr(InProcessEngine, "open", refuse)
    for number, remote in enumerate(remotes):
        session.submit(an_order(f"r{number}", remote, OURS))
    assert opening.wait(10.0)
    opening.clear()
    go_on.set()
    assert {worker.next_end().cause for _ in remotes} == {"unreachable"}
    assert not opening.is_set(), "it was tried once for all"
    until(lambda: prefill.leases.active == 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architecture", "Qwen3ForCausalLM"),
        ("config_digest", "0ddba11"),
        ("weights_digest", "f00d"),
        ("layers", 4),
        ("kv_heads", 8),
        ("head_size", 64),
        ("model_dtype", "float16"),
        ("cache_dtype", "fp8"),
    ],
)
def test_an_engine_with_another_model_is_incompatible_and_nothing_is_read(site: Site, field: str, value: Any) -> None:
    prefill = site.prefill(identity=replace(IDENTITY, **{field: value}))
    worker = site.decode()[0]
    end = pull_once(site, prefill.prefill("r", THEIRS), worker)
    assert end.cause == "incompatible"
    assert f"{field} is {getattr(IDENTITY, field)!r} here and {value!r} there" in end.reason
    assert site.fabric.reads == 0
    assert worker.untouched
    until(lambda: prefill.leases.collect() == ("r",))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (replace(MODEL, contents=(6, 12)), ("'content'", "16 here and 18 on")),
        (replace(MODEL, item_size=1), ("'item_size'", "2 here and 1 on")),
        (replace(MODEL, kv_heads=2), ("head 2 of layer 'model.layers.0'", "same model")),
        (replace(MODEL, groups=((0, 1),)), ("layer 'model.layers.2'", "same model")),
        (replace(MODEL, windows=(64,)), ("'model.layers.0' sees all tokens here", "a window of 64 tokens on")),
    ],
)
def test_an_engine_with_other_caches_is_incompatible_and_nothing_is_read(
    site: Site, model: Model, words: tuple[str, ...]
) -> None:
    worker = site.decode()[0]
    end = pull_once(site, site.prefill(model=model).prefill("r", THEIRS), worker)
    assert end.cause == "incompatible"
    assert all(word in end.reason for word in words)
    assert site.fabric.reads == 0
    assert worker.untouched


def test_what_a_peer_says_of_its_model_does_not_fill_the_log(site: Site) -> None:
    prefill = site.prefill(identity=replace(IDENTITY, architecture="x" * 1_000_000))
    end = pull_once(site, prefill.prefill("r", THEIRS))
    assert end.cause == "incompatible"
    assert "architecture is 'LlamaForCausalLM' here and 'xxx" in end.reason
    assert len(end.reason) < 5000


def test_numbers_that_no_engine_can_have_are_incompatible(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a surprise, after which others would try the same."""
    prefill, (worker, *_) = site.prefill(), site.decode()
    handle = prefill.service.handle

    def tells(message: Any) -> Any:
        reply = handle(message)
        if isinstance(reply, Welcome):
            first = reply.workers[0]
            far = replace(first, regions=(Region(2**63 - 16, 2**20), *first.regions[1:]))
            reply = msgspec.structs.replace(reply, workers=(far, *reply.workers[1:]))
        return reply

    monkeypatch.setattr(prefill.service, "handle", tells)
    end = pull_once(site, prefill.prefill("r", THEIRS), worker)
    assert end.cause == "incompatible"
    assert site.fabric.reads == 0


@pytest.mark.parametrize(
    ("decode", "prefill", "words"),
    [
        ({"form": "packed"}, {"form": "packed", "packing": "amx"}, ("'packing'", "'k_transposed' here and 'amx' on")),
        ({"form": "packed"}, {"form": "packed", "block_tokens": 32}, ("16 tokens here and 32 on", "--block-size")),
    ],
)
def test_caches_that_kernels_have_packed_in_other_ways_are_incompatible(
    site: Site, decode: dict[str, Any], prefill: dict[str, Any], words: tuple[str, ...]
) -> None:
    worker = site.decode(replace(DECODE, **decode))[0]
    end = pull_once(site, site.prefill(replace(PREFILL, **prefill)).prefill("r", THEIRS), worker)
    assert end.cause == "incompatible"
    assert all(word in end.reason for word in words)
    assert worker.untouched


# Params that do not fit the engine that they name


@pytest.mark.parametrize(
    ("block_ids", "words"),
    [
        (((5, 6, 3, 9),), "remote block table holds 4 blocks"),
        (((),), "remote block table holds 0 blocks"),
        (((5, 6, 3, 9, 12),), "remote block id 12 does not exist: the cache has 12 blocks"),
        (((5, 6, 2**31 - 1, 9, 2),), f"remote block id {2**31 - 1} does not exist"),
        (((5, 6, 0, 9, 2),), "holds no block for token 32"),
        ((), "holds 0 block tables; the prefill engine has 1 cache groups"),
        (((5, 6, 3, 9, 2), (5, 6, 3, 9, 2)), "holds 2 block tables; the prefill engine has 1 cache groups"),
    ],
)
def test_block_ids_that_cannot_be_are_refused_and_nothing_is_read(site: Site, block_ids: Blocks, words: str) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    end = pull_once(site, prefill.prefill("r", THEIRS), worker, remote_block_ids=block_ids)
    assert end.cause == "params"
    assert words in end.reason
    assert site.fabric.reads == 0
    assert worker.untouched
    until(lambda: prefill.leases.collect() == ("r",))


def test_a_pull_with_wrong_params_does_not_hurt_the_next_one(site: Site) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    first, second = prefill.prefill("r1", THEIRS), prefill.prefill("r2", THEIRS)
    session = site.session(worker, first)
    session.submit(an_order("r1", first, OURS, remote_block_ids=((1,),)))
    session.submit(an_order("r2", second, OURS))
    ends = worker.next_end(), worker.next_end()
    assert {end.request_id: end.cause for end in ends} == {"r1": "params", "r2": ""}


def test_an_address_that_cannot_be_one_fails_the_pull(site: Site) -> None:
    end = pull_once(site, site.prefill().prefill("r", THEIRS), remote_host="not a host")
    assert end.cause == "unreachable"
    assert "not a host" in end.reason


def test_a_surprise_ends_the_pull_and_is_logged(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    remote = prefill.prefill("r", THEIRS)
    session = site.session(worker, remote)
    with caplog.at_level(logging.ERROR):
        session.submit(an_order("bad", remote, ()))  # no block tables here: nothing that a scheduler half orders
        end = worker.next_end()
    assert end.cause == "internal"
    assert "IndexError" in end.reason
    assert "unexpected failure of the pull of request bad" in caplog.text
    again = prefill.prefill("r2", THEIRS)
    session.submit(an_order("r2", again, OURS))
    assert worker.next_end().cause == ""
