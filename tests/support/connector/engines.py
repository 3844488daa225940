"""Whole prefill and decode engines in one process: real control channel, real bytes, real leases; no model, no vLLM.

The transfer engine is the in-process one, which fails where a test tells it to. ``Site`` closes in the right order what
a test has built.
"""

import queue
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from layout import staging
from layout.cost import CostModel
from layout.geometry import ModelIdentity, WorkerGeometry
from pd_connector.orders import ChecksumReport, PullOrder
from pd_connector.params import RemotePrefill, parse_remote_prefill
from pd_connector.scheduler.prefill.lease_service import LeaseService
from pd_connector.scheduler.prefill.leases import LeaseTable
from pd_connector.worker.lease_checksums import CacheChecksums
from pd_connector.worker.peer import PullContext
from pd_connector.worker.pull_end import PullEnd
from pd_connector.worker.remote_reader import RemoteReader
from pd_connector.worker.session import PeerSession
from tests.support.connector.requests import FakeRequest, a_prompt
from tests.support.engine.in_process import InProcessEngine, InProcessFabric
from tests.support.layout.oracle import Engine, Items, Model, Rank, Table, build, unit_tokens
from transfer.control.client import ControlClient
from transfer.control.peer_sockets import ClientSettings
from transfer.control.server import ControlServer
from transfer.copies.reshape import reshape
from transfer.peers import AllowedPeers

MODEL = Model(kv_heads=4, contents=(6, 10), item_size=2, groups=((0, 1, 2),), windows=(0,))
IDENTITY = ModelIdentity("LlamaForCausalLM", "c0ffee", "beef", 3, 4, 8, "bfloat16", "bfloat16")
PREFILL = Engine(layout="BHLNC", blocks=12)
DECODE = Engine(layout="LBHNC", blocks=12)

Blocks = tuple[tuple[int, ...], ...]
THEIRS: Blocks = ((5, 6, 3, 9, 2),)  # of a prompt of 70 tokens on the prefill engine
OURS: Blocks = ((1, 2, 8, 3, 11),)

Closable = TypeVar("Closable")


def placed(ranks: Sequence[Rank]) -> list[Rank]:
    """The same ranks, described at the addresses that their memory really has."""
    return [_place(rank) for rank in ranks]


def _place(rank: Rank) -> Rank:
    base = rank.memory.ctypes.data
    shift = base - rank.base
    groups = tuple(
        replace(group, planes=tuple(replace(plane, address=plane.address + shift) for plane in group.planes))
        for group in rank.geometry.groups
    )
    regions = tuple(replace(region, address=region.address + shift) for region in rank.geometry.regions)
    return replace_rank(rank, replace(rank.geometry, groups=groups, regions=regions), base)


def replace_rank(rank: Rank, geometry: WorkerGeometry, base: int) -> Rank:
    return Rank(rank.model, rank.engine, geometry, base, rank.memory, rank.planes, rank.group_order)


def tables(blocks: Blocks) -> list[Table]:
    """Block tables for the oracle; vLLM's null block is a hole."""
    return [Table(0, tuple(block or -1 for block in ids)) for ids in blocks]


class PrefillEngine:
    """A prefill engine whose requests have been computed: blocks filled, a lease for each."""

    def __init__(
        self,
        fabric: InProcessFabric,
        engine: Engine = PREFILL,
        *,
        model: Model = MODEL,
        identity: ModelIdentity = IDENTITY,
        ttl_s: float = 30.0,
        host: str = "127.0.0.1",
        port: int = 0,
        verify: bool = False,
        writes_late: bool = False,
        max_model_len: int = 0,
    ) -> None:
        leases: LeaseTable[str] = LeaseTable(ttl_s, time.monotonic)
        self.service = LeaseService(
            leases, identity, engine.tp, verify=verify, max_model_len=max_model_len, writes_late=writes_late
        )
        self._host = host
        self._server = ControlServer(self.service, host, port)
        self.service.notify = self._server.changed
        self._server.start()
        self.ranks = []
        self.engines = []
        for rank in placed(build(model, engine, seed=1, base=1 << 40)):
            transfer = InProcessEngine(fabric)
            transfer.register(rank.geometry.regions)
            self.engines.append(transfer)
            geometry = replace(rank.geometry, engine_address=transfer.address, identity=transfer.identity)
            self.ranks.append(replace_rank(rank, geometry, rank.base))
        self.service.set_workers(tuple(rank.geometry for rank in self.ranks))

    def prefill(self, request_id: str, blocks: Blocks, tokens: int = 70, *, is_written: bool = True) -> RemotePrefill:
        """Compute a prompt into ``blocks`` and grant a lease; what the decode engine makes of the answer."""
        for rank in self.ranks:
            rank.fill(tables(blocks))
        request = FakeRequest(request_id, a_prompt(tokens))
        params = self.service.grant(
            request, blocks, request.request_id, (self._host, self._server.port), is_written=is_written
        )
        return parse_remote_prefill(params)

    @property
    def port(self) -> int:
        """Of its control channel."""
        return self._server.port

    @property
    def leases(self) -> LeaseTable[str]:
        """Its leases; each holds the id of its request."""
        return self.service.leases

    def hash_leased(self) -> None:
        """What the next steps of an engine that verifies do: the workers sum what was leased, and report."""
        for order in self.service.checksums.take_orders():
            for number, rank in enumerate(self.ranks):
                sums = CacheChecksums(rank.geometry).sums(order.block_ids, 0, order.end_token, threading.Event())
                self.service.checksums.add(ChecksumReport(order.lease_id, number, sums))

    def close(self) -> None:
        self._server.close()
        for engine in self.engines:
            engine.close()


@dataclass
class DecodeWorker:
    """One decode rank: its memory, its engine, and what its pulls have come to."""

    rank: Rank
    engine: InProcessEngine
    client: ControlClient
    reader: int
    readers: int
    before: Items  # the memory as it was at the start
    ends: "queue.SimpleQueue[PullEnd]" = field(default_factory=queue.SimpleQueue)
    identity: ModelIdentity = IDENTITY
    handshake_timeout_s: float = 5.0
    pull_timeout_s: float = 20.0
    reads: RemoteReader | None = None  # without staging if not given

    def context(self) -> PullContext:
        """What this rank's pulls share."""
        return PullContext(
            local=self.rank.geometry,
            model=self.identity,
            engine=self.engine,
            client=self.client,
            allowed=AllowedPeers(),
            reader=self.reader,
            readers=self.readers,
            reads=self.reads or RemoteReader(CostModel.of_protocol("tcp"), self.rank.geometry.regions),
            handshake_timeout_s=self.handshake_timeout_s,
            pull_timeout_s=self.pull_timeout_s,
        )

    def next_end(self, timeout_s: float = 30.0) -> PullEnd:
        """The next pull that settles."""
        return self.ends.get(timeout=timeout_s)

    def holds(
        self, pulled: Sequence[tuple[Blocks, int, int]], remote: Engine = PREFILL, lacking: Collection[int] = ()
    ) -> bool:
        """Whether the memory is as before, except for pulls: blocks, first token, end token. To the last byte.

        Layers that are ``lacking`` on the other side are as before.
        """
        expected = self.before.copy()
        for blocks, first, end in pulled:
            for held in self.rank.planes:
                table = tables(blocks)[held.group]
                unit = unit_tokens(self.rank.engine, remote)
                tokens = [
                    token
                    for token in range(first, -(-end // unit) * unit)
                    if table.id_at(token, self.rank.engine.block_tokens) >= 0
                ]
                read = [number for number, layer in enumerate(held.layers) if layer not in lacking]
                positions = self.rank.positions(held, table, tokens)[:, read]
                expected[positions] = self.rank.wanted_values(held, tokens)[:, read]
        return bool(np.array_equal(expected, self.rank.memory))

    @property
    def untouched(self) -> bool:
        """Whether no byte has changed."""
        return self.holds([])

    def close(self) -> None:
        self.client.close()
        self.engine.close()


def decode_workers(fabric: InProcessFabric, engine: Engine = DECODE, model: Model = MODEL) -> list[DecodeWorker]:
    """All ranks of a decode engine."""
    workers = []
    for index, rank in enumerate(placed(build(model, engine, seed=2, base=1 << 41))):
        transfer = InProcessEngine(fabric)
        transfer.register(rank.geometry.regions)
        client = ControlClient(ClientSettings(retry_s=0.05, retry_cap_s=0.2))
        workers.append(DecodeWorker(rank, transfer, client, index, engine.tp * engine.pp, rank.memory.copy()))
    return workers


def an_order(
    request_id: str, remote: RemotePrefill, local: Blocks, first: int = 0, end: int = 69, **changes: object
) -> PullOrder:
    """The order of a pull; ``changes`` are made to what the prefill engine answered."""
    return PullOrder(request_id, msgspec.structs.replace(remote, **changes), local, first, end, f"pull of {request_id}")


class Site:
    """What a test builds, closed in the right order after it."""

    def __init__(self) -> None:
        # As workers do before they pull: on a busy machine, a lease does not last as long as this may take.
        staging.warm_up()
        reshape.warm_up()
        self.fabric = InProcessFabric()
        self._open: list[Any] = []
        self._sessions: list[PeerSession] = []

    def add(self, thing: Closable) -> Closable:
        """Close ``thing`` after the test."""
        self._open.append(thing)
        return thing

    def prefill(self, engine: Engine = PREFILL, **options: Any) -> PrefillEngine:
        return self.add(PrefillEngine(self.fabric, engine, **options))

    def decode(self, engine: Engine = DECODE, model: Model = MODEL) -> list[DecodeWorker]:
        return [self.add(worker) for worker in decode_workers(self.fabric, engine, model)]

    def session(self, worker: DecodeWorker, remote: RemotePrefill, **changes: Any) -> PeerSession:
        """A session with the engine that ``remote`` names; ``changes`` are made to its context, or to ``settle``."""
        settle = changes.pop("settle", worker.ends.put)
        context: PullContext = replace(worker.context(), **changes)
        session = PeerSession(context, settle, remote.engine)
        self._sessions.append(session)
        return session

    def close(self) -> None:
        for session in self._sessions:
            session.check_integrity()
            session.close()
        stuck = [session for session in self._sessions if not session.join(10.0)]
        for thing in reversed(self._open):
            thing.close()
        assert not stuck


def pull_once(site: Site, remote: RemotePrefill, worker: DecodeWorker | None = None, **changes: Any) -> PullEnd:
    """The end of one pull into ``OURS``; ``changes`` are made to what the prefill engine answered."""
    worker = worker or site.decode()[0]
    order = an_order("r", remote, OURS, **changes)
    site.session(worker, order.remote).submit(order)
    end = worker.next_end()
    assert end.request_id == "r"
    return end
