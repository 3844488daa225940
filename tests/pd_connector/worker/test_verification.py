"""What was pulled is what was leased, between any two geometries, and one wrong byte anywhere is found and named.

First the comparison alone, on memories that are filled and copied as the oracle says; then whole pulls over the real
control channel.
"""

import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout.compatibility import IncompatibleCachesError
from layout.geometry import WorkerGeometry
from layout.plan import compile_plans
from layout.sharding import Source, choose_sources
from pd_connector.orders import Cause, ChecksumOrder, ChecksumReport, PullOrder, block_table
from pd_connector.scheduler.prefill.checksum_table import ChecksumTable
from pd_connector.worker import verification
from pd_connector.worker.lease_checksums import CacheChecksums, Interrupted
from pd_connector.worker.pull_end import PullFailed
from pd_connector.worker.verification import Verifier
from tests.support.connector.book_client import BookClient
from tests.support.connector.engines import (
    DECODE,
    MODEL,
    OURS,
    PREFILL,
    THEIRS,
    Blocks,
    DecodeWorker,
    Site,
    an_order,
    placed,
    pull_once,
    tables,
)
from tests.support.connector.requests import a_prompt, a_remote
from tests.support.control.faulty_network import Direction, FaultyNetwork, chaos
from tests.support.layout.oracle import LAYOUTS, WHOLE_HEADS, Engine, Held, Model, Rank, build
from tests.support.layout.ranks import a_rank, compressed, reader_of
from tests.support.layout.strategies import FORMS, WINDOW_TOKENS, engines, few, models
from tests.support.waiting import until
from transfer.control.failures import PeerUnreachable
from transfer.control.messages import Checksummed, decode_request


@dataclass(repr=False)
class Transfer:
    """A prompt that one engine has leased and another one pulls."""

    ours: list[Rank]
    theirs: list[Rank]
    order: PullOrder
    client: BookClient

    @classmethod
    def of(
        cls, model: Model, local: Engine, remote: Engine, span: tuple[int, int], ids: tuple[Blocks, Blocks]
    ) -> "Transfer":
        """``ids``: block ids here and there, by the model's groups."""
        ours, theirs = placed(build(model, local, 1, 1 << 40)), placed(build(model, remote, 2, 1 << 41))
        for rank in theirs:
            rank.fill(tables(ids[1]))
        in_order = [
            tuple(side[group] for group in ranks[0].group_order)
            for side, ranks in zip(ids, (ours, theirs), strict=True)
        ]
        prefilled = a_remote(a_prompt(span[1] + 1), remote_block_ids=in_order[1])
        order = PullOrder("r", prefilled, in_order[0], *span, "pull")
        book = ChecksumTable(frozenset)
        book.set_workers(len(theirs))
        return cls(ours, theirs, order, BookClient(book))

    def lease(self, rank: Rank) -> None:
        """The prefill engine's workers, as far as ``rank`` reads from them, sum what is leased."""
        leased = ChecksumOrder(self.order.remote.lease_id, self.order.remote.remote_block_ids, self.order.end_token)
        self.client.book.order(leased)
        assert self.client.book.take_orders() == (leased,)
        for source in self.sources(rank):
            theirs = self.theirs[source.remote].geometry
            sums = CacheChecksums(theirs).sums(leased.block_ids, 0, leased.end_token, threading.Event())
            self.client.book.add(ChecksumReport(leased.lease_id, source.remote, sums))

    def pull(self, rank: Rank) -> None:
        sides = (self.order.local_block_ids, self.order.remote.remote_block_ids)
        local, remote = ([block_table(ids) for ids in side] for side in sides)
        for source, plan in compile_plans(rank.geometry, self.workers, self.sources(rank)).items():
            copies = plan.instantiate(local, remote, self.order.first_token, self.order.end_token)
            rank.receive(copies, self.theirs[source])

    def verify(self, rank: Rank) -> None:
        verifier = Verifier(CacheChecksums(rank.geometry), self.client)
        verifier.check_peer(True, self.workers, self.sources(rank))
        verifier.verify(self.order, self.workers, self.sources(rank), time.monotonic() + 10, threading.Event())

    def sources(self, rank: Rank) -> tuple[Source, ...]:
        return choose_sources(rank.geometry, self.workers)

    @property
    def workers(self) -> list[WorkerGeometry]:
        return [rank.geometry for rank in self.theirs]

    def pulled_tokens(self, held: Held) -> list[int]:
        """Of a plane of the decode engine."""
        rank = self.ours[0]
        ids = self.order.local_block_ids[rank.group_order.index(held.group)]
        size = rank.engine.tokens_of(held.group)
        return [token for token in range(self.order.first_token, self.order.end_token) if ids[token // size]]


@st.composite
def transfers(draw: st.DrawFn, model: Model, local: Engine, remote: Engine) -> Transfer:
    """A prefix hit of up to two blocks, then up to 150 tokens; windowed groups begin with holes."""
    groups = range(len(model.groups))
    hit = draw(st.integers(0, 1)) * max(local.tokens_of(group) for group in groups)
    span = hit, hit + draw(st.integers(1, min(150, 300 - hit)))
    seed = draw(st.integers(0, 99))

    def side(engine: Engine) -> Blocks:
        return tuple(_block_ids(engine, local, group, model.windows[group], span, seed) for group in groups)

    return Transfer.of(model, local, remote, span, (side(local), side(remote)))


def _block_ids(
    engine: Engine, local: Engine, group: int, window: int, span: tuple[int, int], seed: int
) -> tuple[int, ...]:
    wanted = max(0, span[1] - window) // local.tokens_of(group) * local.tokens_of(group) if window else 0
    ids = np.random.default_rng(seed + group).permutation(engine.blocks - 1) + 1
    ids[: wanted // engine.tokens_of(group)] = 0
    return tuple(ids[: -(-(span[1] + 1) // engine.tokens_of(group))].tolist())


def a_transfer(
    data: st.DataObject, model: Model, layouts: tuple[str, str], forms: tuple[str, str], kernel: int = 0
) -> Transfer:
    local = data.draw(engines(model, layouts[0], forms[0], kernel), "local")
    remote = data.draw(engines(model, layouts[1], forms[1], kernel), "remote")
    return data.draw(transfers(model, local, remote))


def assert_verified_until_a_byte_is_wrong(data: st.DataObject, transfer: Transfer) -> None:
    rank = data.draw(st.sampled_from(transfer.ours))
    transfer.lease(rank)
    transfer.pull(rank)
    transfer.verify(rank)
    held = data.draw(st.sampled_from(rank.planes))
    if not (tokens := transfer.pulled_tokens(held)):
        return
    token, layer, head = (data.draw(st.integers(0, len(axis) - 1)) for axis in (tokens, held.layers, held.heads))
    table = tables(transfer.order.local_block_ids)[rank.group_order.index(held.group)]
    places = rank.positions(held, table, [tokens[token]])[0, layer, head].ravel()
    rank.memory[data.draw(st.sampled_from(places.tolist()))] ^= data.draw(st.integers(1, 255))
    assert_named(transfer, rank, held, (held.layers[layer], held.heads[head], tokens[token]))


def assert_named(transfer: Transfer, rank: Rank, held: Held, place: tuple[int, int, int]) -> None:
    """Verification fails, and says where."""
    with pytest.raises(PullFailed) as failed:
        transfer.verify(rank)
    assert failed.value.cause is Cause.CHECKSUM
    wording = (
        r"1 of (\d+) checksums .* layer 'model\.layers\.(\d+)', .* head (\d+), tokens (\d+) to (\d+): "
        r"(\w{16}) here, (\w{16}) when"
    )
    said = re.search(wording, str(failed.value))
    assert said, str(failed.value)
    layer, head, token = place
    assert (int(said[2]), int(said[3])) == (layer, head)
    assert int(said[4]) <= token <= int(said[5])
    assert int(said[5]) - int(said[4]) < max(
        16, rank.engine.kernel_tokens_of(held.group) if rank.engine.form == "packed" else 0
    )
    assert said[6] != said[7]


@pytest.mark.parametrize("here", LAYOUTS)
@few
@given(data=st.data())
def test_checksums_are_equal_between_any_two_forms_and_one_wrong_byte_is_named(here: str, data: st.DataObject) -> None:
    model = data.draw(models((1, 2, 4)))
    there = data.draw(st.sampled_from(LAYOUTS))
    assert_verified_until_a_byte_is_wrong(
        data, a_transfer(data, model, (here, there), data.draw(st.sampled_from(FORMS)))
    )


@pytest.mark.parametrize("here", WHOLE_HEADS)
@pytest.mark.parametrize("form", ["packed", "transposed"])
@few
@given(data=st.data())
def test_so_they_are_where_a_kernel_orders_a_block(here: str, form: str, data: st.DataObject) -> None:
    model = data.draw(models((1, 2, 4)))
    kernel = data.draw(st.sampled_from([16, 32])) if form == "packed" else 0
    there = data.draw(st.sampled_from(WHOLE_HEADS))
    assert_verified_until_a_byte_is_wrong(data, a_transfer(data, model, (here, there), (form, form), kernel))


@pytest.mark.parametrize("layout", LAYOUTS)
@few
@given(data=st.data())
def test_what_was_overwritten_under_its_lease_is_found(layout: str, data: st.DataObject) -> None:
    model = Model(4, (3, 2), 2, ((0, 2), (1,)), (0, WINDOW_TOKENS))
    transfer = a_transfer(data, model, (layout, data.draw(st.sampled_from(LAYOUTS))), data.draw(st.sampled_from(FORMS)))
    rank = data.draw(st.sampled_from(transfer.ours))
    transfer.lease(rank)
    source = data.draw(st.sampled_from(transfer.sources(rank)))
    share = data.draw(st.sampled_from(source.shares))
    theirs = transfer.theirs[source.remote]
    described = [plane for group in theirs.geometry.groups for plane in group.planes]
    held = theirs.planes[described.index(theirs.geometry.groups[share.remote_group].planes[share.remote_plane])]
    layer = int(data.draw(st.sampled_from(share.layers)).rsplit(".", 1)[1])
    head = data.draw(st.integers(share.head_start, share.head_end - 1))
    token = data.draw(st.sampled_from(transfer.pulled_tokens(held)))
    table = tables(transfer.order.remote.remote_block_ids)[theirs.group_order.index(held.group)]
    byte = theirs.positions(held, table, [token])[0, held.layers.index(layer), held.heads.index(head)].flat[0]
    theirs.memory[byte] ^= 1
    transfer.pull(rank)
    assert_named(transfer, rank, held, (layer, head, token))


def whole(tokens: int, local: Engine, remote: Engine) -> Transfer:
    ids = tuple(tuple(range(1, -(-(tokens + 1) // engine.block_tokens) + 1)) for engine in (local, remote))
    return Transfer.of(MODEL, local, remote, (0, tokens), ((ids[0],), (ids[1],)))


@pytest.mark.thorough
def test_a_long_prompt_is_compared_in_longer_stretches() -> None:
    engine = Engine("BHLNC", block_tokens=64, blocks=800)
    transfer = whole(50_000, engine, engine)
    transfer.lease(transfer.ours[0])
    transfer.pull(transfer.ours[0])
    transfer.verify(transfer.ours[0])
    (asked,) = transfer.client.asked
    assert transfer.client.largest <= 2**15
    assert asked.borders[0] == 0
    assert asked.borders[-1] == 50_000
    assert len(asked.borders) <= 2050
    assert all(border % 16 == 0 for border in asked.borders[:-1])


def test_a_stretch_ends_where_a_window_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies before is not pulled, and a stretch that has both in it could not be compared."""
    monkeypatch.setattr(verification, "_RANGES_PER_ANSWER", 2)
    model = Model(4, (3, 2), 2, ((0, 2), (1,)), (0, WINDOW_TOKENS))
    engine = Engine("BHLNC", blocks=12)
    ids = tuple((*([0] * holes), *range(holes + 1, 10)) for holes in (0, 4))
    transfer = Transfer.of(model, engine, engine, (0, 130), (ids, ((ids[0]), (0, 0, *range(3, 10)))))
    (rank,) = transfer.ours
    transfer.lease(rank)
    transfer.pull(rank)
    transfer.verify(rank)
    assert [asked.borders for asked in transfer.client.asked] == [(0, 80, 130), (0, 64, 80, 130)]


def test_a_block_size_that_cannot_be_compared_is_refused_with_both_values() -> None:
    transfer = whole(40, Engine("BHLNC", block_tokens=24), Engine("BHLNC", block_tokens=32))
    with pytest.raises(IncompatibleCachesError, match=r"block size is 24 tokens here, .* of 16 tokens"):
        transfer.verify(transfer.ours[0])


def test_a_prefill_engine_that_answers_with_another_number_of_checksums_is_not_believed() -> None:
    transfer = whole(40, DECODE, PREFILL)
    transfer.lease(transfer.ours[0])
    transfer.client.book.answer = lambda asked: Checksummed((1, 2))  # type: ignore[method-assign]
    with pytest.raises(PullFailed, match="answered with 2 checksums; 36 of 64 bits were asked for"):
        transfer.verify(transfer.ours[0])


def test_a_pull_that_ends_elsewhere_than_the_checksums_is_not_believed_to_be_compared() -> None:
    transfer = whole(40, DECODE, PREFILL)
    transfer.order = PullOrder("r", transfer.order.remote, transfer.order.local_block_ids, 0, 39, "pull")
    with pytest.raises(PullFailed, match="checksums are of 40 tokens; this pull ends at 39"):
        transfer.verify(transfer.ours[0])


# Whole pulls


def verifying(worker: DecodeWorker) -> dict[str, Verifier]:
    return {"verifier": Verifier(CacheChecksums(worker.rank.geometry), worker.client)}


@pytest.mark.thorough
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (1, 2), (4, 2), (2, 8)])
def test_a_verified_pull_ends_as_any_other_and_is_timed(site: Site, prefill_tp: int, decode_tp: int) -> None:
    prefill = site.prefill(Engine(PREFILL.layout, tp=prefill_tp, blocks=12), verify=True)
    workers = site.decode(Engine(DECODE.layout, tp=decode_tp, blocks=12))
    remote = prefill.prefill("r", THEIRS)
    prefill.hash_leased()
    for worker in workers:
        site.session(worker, remote, **verifying(worker)).submit(an_order("r", remote, OURS))
        end = worker.next_end()
        assert (end.cause, end.reason) == ("", "")
        assert end.seconds["verify"] > 0
    assert prefill.leases.collect() == ("r",)
    assert all(worker.holds([(OURS, 0, 69)]) for worker in workers)


def test_a_difference_fails_the_pull_and_ends_its_lease(site: Site) -> None:
    prefill, (worker,) = site.prefill(verify=True), site.decode()
    remote, other = prefill.prefill("r", THEIRS), prefill.prefill("other", THEIRS)
    prefill.hash_leased()
    (rank,) = prefill.ranks
    place = rank.positions(rank.planes[0], tables(THEIRS)[0], [33])[0, 1, 2, 3, 0]
    rank.memory[place] ^= 0x10
    session = site.session(worker, remote, **verifying(worker))
    session.submit(an_order("r", remote, OURS))
    end = worker.next_end()
    assert end.cause is Cause.CHECKSUM
    assert "1 of 60 checksums" in end.reason
    assert "layer 'model.layers.1', part 'kv', KV head 2, tokens 32 to 47" in end.reason
    assert "when prefill rank 0 leased it" in end.reason
    until(lambda: prefill.leases.collect() == ("r",))
    rank.memory[place] ^= 0x10
    session.submit(an_order("other", other, OURS))
    assert worker.next_end().cause == ""


def test_a_pull_waits_for_checksums_that_are_still_being_taken(site: Site) -> None:
    prefill, (worker,) = site.prefill(verify=True), site.decode()
    remote = prefill.prefill("r", THEIRS)
    site.session(worker, remote, **verifying(worker)).submit(an_order("r", remote, OURS))
    until(lambda: worker.holds([(OURS, 0, 69)]))
    time.sleep(0.05)
    assert worker.ends.empty()
    prefill.hash_leased()
    assert worker.next_end().cause == ""


def test_a_pull_waits_no_longer_than_the_pull_timeout(site: Site) -> None:
    prefill, (worker,) = site.prefill(verify=True), site.decode()
    worker.pull_timeout_s = 1.0
    remote = prefill.prefill("r", THEIRS)
    site.session(worker, remote, **verifying(worker)).submit(an_order("r", remote, OURS))
    end = worker.next_end()
    assert end.cause is Cause.TIMEOUT
    assert "before the checksums were there" in end.reason


def test_a_lease_that_ends_while_its_checksums_are_taken_fails_the_pull(site: Site) -> None:
    prefill, (worker,) = site.prefill(verify=True), site.decode()
    remote = prefill.prefill("r", THEIRS)
    site.session(worker, remote, **verifying(worker)).submit(an_order("r", remote, OURS))
    until(lambda: worker.holds([(OURS, 0, 69)]))
    prefill.leases.cancel_all()
    prefill.hash_leased()
    end = worker.next_end()
    assert end.cause is Cause.LEASE
    assert remote.lease_id in end.reason


def test_checksums_that_could_not_be_taken_fail_the_pull(site: Site) -> None:
    prefill, (worker,) = site.prefill(verify=True), site.decode()
    remote = prefill.prefill("r", THEIRS)
    assert prefill.service.checksums is not None
    prefill.service.checksums.add(ChecksumReport(remote.lease_id, 0, None))
    site.session(worker, remote, **verifying(worker)).submit(an_order("r", remote, OURS))
    end = worker.next_end()
    assert end.cause is Cause.CHECKSUM
    assert "prefill rank 0 has no checksums to compare with: 'failed'" in end.reason


def test_a_prefill_engine_that_takes_no_checksums_is_refused_at_the_handshake(site: Site) -> None:
    prefill, (worker,) = site.prefill(), site.decode()
    remote = prefill.prefill("r", THEIRS)
    site.session(worker, remote, **verifying(worker)).submit(an_order("r", remote, OURS))
    end = worker.next_end()
    assert end.cause is Cause.INCOMPATIBLE
    for words in ("'verify' is true here and false on the remote engine", '"verify": true in its kv_connector_extra'):
        assert words in end.reason
    assert worker.untouched


def test_a_decode_engine_that_does_not_verify_needs_no_checksums(site: Site) -> None:
    assert pull_once(site, site.prefill(verify=True).prefill("r", THEIRS)).cause == ""


def test_questions_and_answers_that_are_lost_repeated_and_late_change_nothing(site: Site) -> None:
    prefill, (worker,) = site.prefill(verify=True), site.decode()
    with FaultyNetwork(prefill.port, chaos(3, lose=0.3, repeat=0.3, longest_delay_s=0.05)) as network:
        for number in range(5):
            remote = prefill.prefill(f"r{number}", THEIRS)
            prefill.hash_leased()
            order = an_order(f"r{number}", remote, OURS, remote_port=network.port)
            site.session(worker, order.remote, **verifying(worker)).submit(order)
            assert worker.next_end().cause == ""
    until(lambda: prefill.leases.active == 0)


def test_an_engine_that_shuts_down_does_not_wait_for_checksums(site: Site) -> None:
    prefill, (worker,) = site.prefill(verify=True), site.decode()
    remote = prefill.prefill("r", THEIRS)
    session = site.session(worker, remote, **verifying(worker))
    session.submit(an_order("r", remote, OURS))
    until(lambda: worker.holds([(OURS, 0, 69)]))
    session.close()
    assert session.join(2.0)
    assert worker.ends.empty()


def test_an_engine_that_shuts_down_sums_nothing_more() -> None:
    transfer = whole(40, DECODE, PREFILL)
    closing = threading.Event()
    closing.set()
    verifier = Verifier(CacheChecksums(transfer.ours[0].geometry), transfer.client)
    with pytest.raises(Interrupted):
        verifier.verify(
            transfer.order, transfer.workers, transfer.sources(transfer.ours[0]), time.monotonic() + 5, closing
        )


@pytest.mark.parametrize(("left_s", "cause"), [(0.5, Cause.TIMEOUT), (60.0, Cause.UNREACHABLE)])
def test_who_had_no_time_to_answer_is_not_unreachable(
    monkeypatch: pytest.MonkeyPatch, left_s: float, cause: Cause
) -> None:
    """Else one pull that comes late would fail all others from the same P."""
    transfer, waited = whole(40, DECODE, PREFILL), list[float]()

    def request(host: str, port: int, message: Any, timeout_s: float) -> Future[Any]:
        waited.append(timeout_s)
        answer: Future[Any] = Future()
        answer.set_exception(PeerUnreachable(host=host, port=port, request_type="c", tried_s=timeout_s, attempts=1))
        return answer

    monkeypatch.setattr(transfer.client, "request", request)
    (rank, *_), closing = transfer.ours, threading.Event()
    verifier = Verifier(CacheChecksums(rank.geometry), transfer.client)
    with pytest.raises(PullFailed) as failed:
        verifier.verify(transfer.order, transfer.workers, transfer.sources(rank), time.monotonic() + left_s, closing)
    assert failed.value.cause is cause
    assert waited == [pytest.approx(max(left_s, 1.0), abs=1.0)]


def test_the_answer_comes_before_the_release(site: Site) -> None:
    """Only while the lease is held are the checksums of a prompt known, and its blocks sure to be its own."""
    prefill, (worker,) = site.prefill(verify=True), site.decode()
    remote = prefill.prefill("r", THEIRS)
    prefill.hash_leased()
    seen: list[str] = []

    def remember(direction: Direction, frame: bytes) -> Sequence[tuple[float, bytes]]:
        if direction is Direction.REQUEST:
            seen.append(str(decode_request(frame)[1].__struct_config__.tag))
        return [(0.0, frame)]

    with FaultyNetwork(prefill.port, remember) as network:
        order = an_order("r", remote, OURS, remote_port=network.port)
        site.session(worker, order.remote, **verifying(worker)).submit(order)
        assert worker.next_end().cause == ""
    assert list(dict.fromkeys(seen)) == ["hello", "checksums", "release"]


def test_a_block_of_a_compressed_cache_has_whole_runs_however_few_its_rows_are() -> None:
    rank = a_rank(Model(1, (4, 4), 2, ((0, 1),), (0,)), Engine("LBNHC", block_tokens=32, blocks=4))
    geometry = compressed(rank, 128)
    nobody: Any = None
    verifier = Verifier(CacheChecksums(geometry, reader_of(rank)), nobody)
    verifier.check_peer(True, [geometry], choose_sources(geometry, [geometry]))
