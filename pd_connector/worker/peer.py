"""A prefill engine after the handshake, as a decode worker knows it: its caches, the plans, the links to its ranks."""

import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from layout.compatibility import check_models, check_transports
from layout.conversion import describe_conversion
from layout.cost import ReadCost
from layout.geometry import ModelIdentity, WorkerGeometry
from layout.plan import BlockTable, Plan, compile_plans
from layout.regions import RegionTable
from layout.sharding import Source, choose_sources
from pd_connector.orders import Cause
from pd_connector.params import EngineAddress
from pd_connector.recipe_keys import EngineSizes
from pd_connector.traces import TracePull
from pd_connector.worker.device_fence import RaiseFence, no_fence
from pd_connector.worker.peer_watch import PeerWatch
from pd_connector.worker.pull_end import MIN_ANSWER_S, PullFailed
from pd_connector.worker.remote_reader import RemoteReader, for_each_rank
from pd_connector.worker.same_host import SameHostLinks, TwoWayEngine
from pd_connector.worker.verification import Verifier
from transfer.control.client import ControlClient
from transfer.control.messages import Hello, Place, Welcome
from transfer.engine.interface import Link, ReadFailed, TransferEngine
from transfer.errors import PeerNotAllowed, TransferError
from transfer.peers import AllowedPeers

logger = logging.getLogger(__name__)

#: Of all ranks, before neighbouring blocks are joined, so that those of a range take a quarter of a gigabyte.
_RANGE_DESCRIPTORS = 1 << 20

#: Is given the block tables of a request here, by cache group, and one past the last token that is pulled.
ClearTails: TypeAlias = Callable[[Sequence[BlockTable], int], None]


def keep_tails(_tables: Sequence[BlockTable], _end_token: int) -> None:
    """Leave what a pull does not write as it is: nothing reads it before it is written."""


@dataclass(frozen=True)
class PullContext:
    """What all pulls of a worker have in common."""

    local: WorkerGeometry
    model: ModelIdentity
    engine: TransferEngine
    client: ControlClient
    allowed: AllowedPeers  # the engines that may be contacted
    reader: int  # this worker's index among the readers of a lease
    readers: int
    reads: RemoteReader
    handshake_timeout_s: float
    pull_timeout_s: float
    max_model_len: int = 0  # of this engine; 0: unknown
    stated: EngineSizes | None = None  # what this engine's settings say of prefill engines
    replica_turn: int = 0  # see ``layout.sharding.choose_sources``
    verifier: Verifier | None = None  # compares the checksums of every pull
    #: Whether a prompt is read from P's device while P computes the rest of it. P's host memory is, in any case, and so
    #: is what is mapped here of another GPU.
    reads_ahead: bool = True
    #: What a pull waits for before it writes: the model's stream may still write to blocks that vLLM has freed.
    raise_fence: RaiseFence = no_fence
    #: Clears what a pull leaves of its last blocks, given their tables and its last token.
    clear_tails: ClearTails = keep_tails
    trace: TracePull | None = None  # gets every pull of a request that has a trace; None if tracing is off
    clock: Callable[[], float] = time.monotonic


class Peer:
    """Holds what the handshake returned, and owns the links to the prefill engine's ranks.

    Belongs to one thread. While that thread waits for those of a pull, each of them may use the link of its own rank.
    """

    def __init__(
        self,
        context: PullContext,
        address: EngineAddress,
        welcome: Welcome,
        sources: Sequence[Source],
        plans: Mapping[int, Plan],
        host_plans: Mapping[int, Plan] | None = None,
        near: SameHostLinks | None = None,
    ) -> None:
        """Open no link yet.

        Args:
            context: of the worker.
            address: where it was asked, and for whom.
            welcome: what the handshake returned.
            sources: which ranks are read from.
            plans: by index into the ranks.
            host_plans: read the ranks' host memory; None if nothing moves there.
            near: links that read the ranks' device memory instead of those of ``context.engine``, as far as they can.

        Raises:
            ValueError: regions of a rank overlap, or one is empty.
        """
        self.workers = welcome.workers
        self.sources = sources
        self.plans = plans  # by index into workers: the ranks that are read from
        self.host_plans = host_plans
        self.locates = welcome.locates or host_plans is not None  # leases are located before they are read
        #: A range of tokens that ends at a multiple of this cuts no unit of any rank.
        every_plan = (*plans.values(), *(host_plans or {}).values())
        self.border_tokens = math.lcm(*(unit for plan in every_plan for unit in plan.unit_tokens))
        self.token_bytes = sum(plan.token_bytes for plan in plans.values())
        # The most tokens of a range, which ends at a border: of what has more descriptors, one range follows another.
        runs = max(sum(plan.token_runs for plan in each.values()) for each in (plans, host_plans or {}))
        self.range_tokens = self.border_tokens * max(int(_RANGE_DESCRIPTORS / max(runs, 1e-9)) // self.border_tokens, 1)
        self._readable = [worker.regions for worker in welcome.workers]
        if host_plans is not None:
            for rank, host in enumerate(welcome.host_workers):
                self._readable[rank] += host.regions
        self.regions = {rank: RegionTable(self._readable[rank]) for rank in plans}
        timeout_s = context.pull_timeout_s
        self.watch = PeerWatch(context.client, address.engine_id, address.at, timeout_s, context.clock)  # for all lanes
        self._engine = context.engine
        self._allowed = context.allowed
        self._links: dict[int, Link] = {}
        self._near = near

    @property
    def has_states(self) -> bool:
        """Whether some layers keep states instead of tokens."""
        return any(plan.states for plan in self.plans.values())

    @property
    def is_linked(self) -> bool:
        """Whether links to all ranks that are read from are open."""
        near = self._near.ranks if self._near is not None else frozenset()
        return self._links.keys() | near >= self.plans.keys()

    @property
    def is_read_between_devices(self) -> bool:
        """Whether all ranks' device memory is mapped here, and on other GPUs: no process there takes part in a read.

        Two processes on one GPU take turns, and a read takes the prefill engine's.
        """
        return self._near is not None and self._near.ranks_on_other_devices >= self.plans.keys()

    @property
    def costs(self) -> list[ReadCost | None]:
        """What reads of the ranks' device memory cost; None: what they cost over the engine's protocol."""
        return [self._near.cost(rank) if self._near is not None else None for rank in self.plans]

    def with_own_links(self) -> "Peer":
        """Return the same prefill engine, known from the same handshake, for another thread: no link is open yet."""
        other = copy(self)
        other._links = {}
        other._near = self._near.with_own_links() if self._near is not None else None
        return other

    def open_links(self, ranks: Iterable[int], place: Place = Place.DEVICE) -> None:
        """Open the links to ranks that ``link`` would open, at once: each takes several round trips.

        Raises:
            PullFailed: as ``link``, of the first rank that fails, once all have ended.
        """
        for_each_rank(self._connect, [rank for rank in ranks if self._open_link(rank, place) is None])

    def link(self, rank: int, place: Place = Place.DEVICE) -> Link:
        """Return the link to a rank's memory, and open it if there is none that the network can be expected to know.

        Raises:
            PullFailed: the rank's transfer engine cannot be reached, or may not be contacted.
        """
        return self._open_link(rank, place) or self._connect(rank)

    def _open_link(self, rank: int, place: Place) -> Link | None:
        """Return the link that a rank's memory is read by now; None if one must be opened through the network."""
        if self._near is not None and place is Place.DEVICE and (near := self._near.link(rank)) is not None:
            return near
        link = self._links.get(rank)
        return None if link is None or link.is_stale else link

    @property
    def has_stale_links(self) -> bool:
        """Whether links are open that would be opened anew before they are read over again."""
        return any(link.is_stale for link in self._links.values())

    def drop_stale_links(self) -> None:
        """Close those links. They take threads, files and ports here, and files of the peer."""
        for rank in [rank for rank, link in self._links.items() if link.is_stale]:
            self._links.pop(rank).close()

    def _connect(self, rank: int) -> Link:
        if rank in self._links:
            self._links.pop(rank).close()
        worker = self.workers[rank]
        try:
            self._allowed.check_engine(worker.engine_address)
            regions, given_up = self._readable[rank], self.watch.of_read()
            link = self._links[rank] = self._engine.open(worker.engine_address, regions, worker.identity, given_up)
        except PeerNotAllowed as error:
            where = f"prefill rank {rank}: the transfer engine at {worker.engine_address}"
            raise PullFailed(Cause.DENIED, f"{where}: {error}") from error
        except ReadFailed as error:
            raise PullFailed(Cause.UNREACHABLE, f"prefill rank {rank}: {error}") from error
        return link

    def drop_link(self, rank: int, place: Place = Place.DEVICE) -> None:
        """Close the link to a rank. The next call of ``link`` opens a new one, or finds another way."""
        if self._near is None or place is not Place.DEVICE or not self._near.drop(rank):
            self._links.pop(rank).close()

    def let_go(self) -> None:
        """Let go of the prefill engine's memory, which has ended or is another. Any thread; never waits."""
        if self._near is not None:
            self._near.abandon()

    def close(self) -> None:
        """Close all links."""
        if self._near is not None:
            self._near.close()
        while self._links:
            self._links.popitem()[1].close()


def connect_peer(context: PullContext, address: EngineAddress, deadline: float) -> Peer:
    """Get a prefill engine's geometry, compile the plans and open links to the ranks to read from.

    ``deadline`` is on the context's clock.

    Raises:
        PullFailed: the engine does not answer, is another one, or has caches that cannot be used here.
    """
    left_s, longest_s = deadline - context.clock(), context.handshake_timeout_s
    timeout_s = min(max(left_s, MIN_ANSWER_S), longest_s)
    try:
        welcome = context.client.request(address.host, address.port, Hello(address.engine_id), timeout_s).result()
    except TransferError as error:
        raise PullFailed.unanswered(error, had_time=left_s >= longest_s) from error
    try:
        peer = _make_peer(context, welcome, address)
    except (ValueError, ArithmeticError) as error:  # IncompatibleCachesError, PlanError, regions, impossible numbers
        raise PullFailed(Cause.INCOMPATIBLE, str(error)) from error
    try:
        peer.open_links(peer.plans)
    except BaseException:
        peer.close()
        raise
    logger.info(
        "PDConnector: rank %d pulls from %s, ranks %s of %d: %s",
        context.reader, address, sorted(peer.plans), len(peer.workers),
        describe_conversion(context.local, peer.workers, peer.plans),
    )  # fmt: skip
    if context.reader == 0:
        _warn_of_another_draft(context.model, welcome.model, address)
        _warn_of_shorter_prompts(context.max_model_len, welcome.max_model_len, address)
        _warn_of_contradictions(context.stated or EngineSizes(), welcome, address)
    return peer


def _warn_of_another_draft(here: ModelIdentity, there: ModelIdentity, address: EngineAddress) -> None:
    """Log a warning if both sides draft by models of their own, and not by the same, as far as their weights tell."""
    known = here.weights_digest and there.weights_digest  # else weights may have changed since they were read
    if known and here.draft_digest and there.draft_digest and here.draft_digest != there.draft_digest:
        logger.warning(
            "PDConnector: %s drafts tokens by another model than this engine (%s there, %s here): its draft layers are "
            "pulled and mean nothing to those here, so that fewer drafts are accepted. Start both with the same model "
            "in --speculative-config", address, there.draft_digest[:64], here.draft_digest,
        )  # fmt: skip


def _warn_of_shorter_prompts(here: int, there: int, address: EngineAddress) -> None:
    """Log a warning if a prefill engine refuses prompts that this engine serves. 0: its length is not known."""
    if 0 < there < here:
        logger.warning(
            "PDConnector: %s was started with --max-model-len %d, and this engine with %d: it refuses prompts of %d "
            "tokens or more, and clients read the error of their prefill leg (at exactly %d tokens: 'max_tokens must "
            "be at least 1, got 0'). Start both with the same --max-model-len, or let the router send such prompts "
            "here alone", address, there, here, there, there,
        )  # fmt: skip


def _warn_of_contradictions(stated: EngineSizes, welcome: Welcome, address: EngineAddress) -> None:
    """Log a warning if a recipe's keys say of a prefill engine what it is not."""
    rank, partition = welcome.workers[0], _layer_partition(welcome.workers, welcome.model.layers)
    found = {"tp_size": rank.tp_size, "pp_size": rank.pp_size, "pp_layer_partition": partition}
    if wrong := stated.contradictions(found):
        logger.warning(
            "PDConnector: prefill in kv_connector_extra_config says of %s: %s. PDConnector goes by what it finds; "
            "check the command lines, or correct the key", address, wrong,
        )  # fmt: skip


def _layer_partition(workers: Sequence[WorkerGeometry], layers: int) -> str | None:
    """Return how many of a model's ``layers`` each pipeline stage has, as vLLM is told it.

    None if some of them have no cache to know them by. Those that draft have numbers behind the model's.
    """
    stages: dict[int, set[int]] = {}
    for worker in workers:
        names = (name for group in worker.groups for name in group.layers)
        numbers = (int(found[1]) for name in names if (found := re.search(r"\blayers\.(\d{1,9})\b", name)))
        stages.setdefault(worker.pp_rank, set()).update(number for number in numbers if number < layers)
    counts = [len(numbers) for _, numbers in sorted(stages.items())]
    return ",".join(map(str, counts)) if sum(counts) == layers else None


def _make_peer(context: PullContext, welcome: Welcome, address: EngineAddress) -> Peer:
    """Check that a prefill engine's caches can be used here, and plan how to read them."""
    check_models(context.model, welcome.model)
    check_transports(context.local, welcome.workers)
    sources = choose_sources(context.local, welcome.workers, context.replica_turn)
    for number, worker in enumerate(welcome.workers):
        if worker.identity is None:
            raise ValueError(
                f"prefill rank {number} announces no identity of its transfer engine, so nobody could prove whose "
                "memory is read: its connector is older than this one; use the same version on both sides"
            )
    plans = compile_plans(context.local, welcome.workers, sources)
    if context.verifier is not None:
        context.verifier.check_peer(welcome.verify, welcome.workers, sources)
    until_lost = partial(context.client.until_lost, address.host, address.port)
    near = None
    if isinstance(context.engine, TwoWayEngine):
        near = SameHostLinks(context.engine.second, welcome.workers, str(address), until_lost)
    return Peer(context, address, welcome, sources, plans, _host_plans(context, welcome, plans), near)


def _host_plans(context: PullContext, welcome: Welcome, plans: Mapping[int, Plan]) -> dict[int, Plan] | None:
    """Plan how to read a prefill engine's host memory, from the ranks whose devices are read; None if it cannot be."""
    hosts = welcome.host_workers
    if not hosts:
        return None
    if len(hosts) != len(welcome.workers):
        raise ValueError(
            f"the prefill engine describes the host memory of {len(hosts)} of its {len(welcome.workers)} workers"
        )
    host_plans = compile_plans(context.local, hosts, choose_sources(context.local, hosts, context.replica_turn))
    if host_plans.keys() != plans.keys():
        raise ValueError(
            f"the prefill engine's host memory would be read from its ranks {sorted(host_plans)}, and its device from "
            f"{sorted(plans)}: its workers hold other layers or heads there"
        )
    return host_plans
