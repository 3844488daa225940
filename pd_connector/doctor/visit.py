"""The checks of a running P, in the order in which a decode engine meets it; each needs those before it.

A stranger gets no lease over the control channel: leases are granted to requests. So P is sent two real ones over its
HTTP port, as a router sends them: a short one, to learn who it is, and one whose blocks are pulled.
"""

import math
import queue
import random
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from layout.conversion import describe_conversion, physical_order
from layout.copies import Copies
from layout.geometry import Region, WorkerGeometry
from layout.plan import Plan, compile_plans
from layout.regions import RegionTable
from layout.sharding import choose_sources
from layout.staging import schedule_reads
from pd_connector.config import ConnectorConfig
from pd_connector.doctor.decode import Sizes, at, decode_geometry, imagined_blocks, local_blocks, tables_of
from pd_connector.doctor.findings import Check, CheckFailed, CheckSkipped, Outcome, Verdict
from pd_connector.doctor.http import HttpServer
from pd_connector.doctor.target import Pulled, PullTarget
from pd_connector.engine_limits import ENGINE_LIMITS
from pd_connector.orders import PullOrder
from pd_connector.params import ParamsError, RemotePrefill, parse_remote_prefill
from pd_connector.secret import load_keys
from transfer.control.client import ControlClient
from transfer.control.messages import Cancel, Hello, Renew, Renewed, Reply, Request, Welcome
from transfer.engine.base import ReadFailed
from transfer.errors import TransferError
from transfer.peers import AllowedPeers

if TYPE_CHECKING:
    from pd_connector.worker.peer import Peer

_T = TypeVar("_T")

_SHORT_PROMPT = 8  # tokens
_PINGS, _PULLS, _SMALL_READS, _SMALL_BYTES = 20, 3, 50, 4096
_LEAST_TOKENS = 2  # the last one is never pulled


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the visit is to find out."""

    sizes: Sizes = field(default_factory=Sizes)  # of the decode engine that is imagined
    tokens: int = 2000  # of the prompt whose pull is predicted
    pull_bytes: int = 8 << 20  # that are really pulled, about


class Visit:
    """Visits one P. Owns its control client, its engine, its memory and its leases until ``close``."""

    def __init__(
        self, server: HttpServer, config: ConnectorConfig, host: str, protocol: str, wishes: Wishes | None = None
    ) -> None:
        """Nothing is sent yet. ``host`` and ``protocol`` are what a decode engine here would take."""
        self._server = server
        self._config = config.model_copy(update={"host": host, "protocol": protocol})
        self._protocol = protocol
        self._wishes = wishes or Wishes()
        self._undo = ExitStack()
        self._client: ControlClient | None = None
        self._leases: dict[str, RemotePrefill] = {}  # that have not ended
        self._model = ""
        self._longest = 0  # tokens of a prompt
        self._remote: RemotePrefill | None = None
        self._welcome: Welcome | None = None
        self._plans: dict[int, Plan] = {}
        self._peer: Peer | None = None
        self._pulling: PullTarget | None = None

    @property
    def checks(self) -> list[tuple[str, Check]]:
        """All of them, in order."""
        return [
            ("peer", self.peer),
            ("lease", self.lease),
            ("handshake", self.handshake),
            ("geometry", self.geometry),
            ("conversion", self.conversion),
            ("plan", self.plan),
            ("link", self.link),
            ("pull", self.pull),
        ]

    def close(self) -> None:
        """Give back the leases that are left, and end everything. Idempotent."""
        for remote in list(self._leases.values()):
            self._cancel(remote)
        self._undo.close()

    def peer(self) -> Verdict:
        """Ask the server which model it serves."""
        answer = self._server.ask("/v1/models")
        models = answer.body.get("data")
        if not isinstance(models, list) or not models or not isinstance(models[0], dict) or "id" not in models[0]:
            raise CheckFailed(f"{self._server.url}/v1/models names no model: is it a vLLM server?")
        self._model = str(models[0]["id"])
        longest = models[0].get("max_model_len")
        self._longest = int(longest) - 1 if isinstance(longest, int) else self._wishes.tokens
        text = f"{self._server.url} serves {self._model!r}, prompts of up to {self._longest} tokens"
        if answer.clock_offset_s is not None and abs(answer.clock_offset_s) > 1:
            text += f"; its clock is {answer.clock_offset_s:+.0f} s off ours, which only logs notice"
        values = {"url": self._server.url, "model": self._model, "clock_offset_s": answer.clock_offset_s}
        return Verdict(text, values)

    def lease(self) -> Verdict:
        """Have it prefill a short prompt, and look at what it leases."""
        remote, seconds = self._prefill(min(_SHORT_PROMPT, self._longest))
        self._remote = remote
        text = (
            f"engine {remote.remote_engine_id} leases for {remote.lease_ttl_s:g} s, its control channel is at "
            f"{remote.remote_host}:{remote.remote_port}; {1e3 * seconds:.0f} ms for {remote.remote_num_tokens} tokens"
        )
        values = {
            "engine_id": remote.remote_engine_id,
            "host": remote.remote_host,
            "port": remote.remote_port,
            "lease_ttl_s": remote.lease_ttl_s,
        }
        return Verdict(text, values)

    def handshake(self) -> Verdict:
        """Ask for its caches over the control channel, with this side's secret, and renew the lease some times."""
        remote = _known(self._remote)
        keys = load_keys(self._config.secret_file)
        self._client = ControlClient(keys=keys, allowed=AllowedPeers(self._config.allowed_peers))
        self._undo.callback(self._client.close)
        began = time.perf_counter()
        welcome = self._ask(remote, Hello(remote.remote_engine_id))
        first_s = time.perf_counter() - began
        assert isinstance(welcome, Welcome)
        self._welcome = welcome
        trips = [self._renewal_s(remote) for _ in range(_PINGS)]
        median, worst = statistics.median(trips), max(trips)
        self._cancel(remote)
        text = (
            f"{len(welcome.workers)} workers, {'authenticated and encrypted' if keys else 'without a secret'}; "
            f"{1e3 * first_s:.1f} ms, renewals {1e3 * median:.2f} ms ({1e3 * worst:.1f} ms at the worst)"
        )
        values: dict[str, Any] = {"workers": len(welcome.workers), "secret": keys is not None, "verify": welcome.verify}
        values |= {"hello_ms": round(1e3 * first_s, 3), "renewal_ms": round(1e3 * median, 3)}
        if worst > remote.lease_ttl_s / 3:
            raise CheckFailed(f"{text}: leases of {remote.lease_ttl_s:g} s are renewed every third of that")
        return Verdict(text, values)

    def geometry(self) -> Verdict:
        """Say what its caches are."""
        welcome = _known(self._welcome)
        workers, model = welcome.workers, welcome.model
        first = workers[0]
        orders = sorted({physical_order(plane) for group in first.groups for plane in group.planes})
        sizes = sorted({group.block_tokens for group in first.groups})
        token_bytes = self._token_bytes()
        windows = sorted({group.window for group in first.groups if group.window})
        text = (
            f"{model.architecture}, {model.layers} layers, KV cache {model.cache_dtype}; TP {first.tp_size}, PP "
            f"{first.pp_size}, blocks of {'/'.join(map(str, sizes))} tokens in order {'/'.join(orders)}, "
            f"{token_bytes:.0f} bytes a token, transport {first.transport or 'unknown'}"
            + (f", windows of {'/'.join(map(str, windows))} tokens" if windows else "")
        )
        values = {
            "architecture": model.architecture,
            "cache_dtype": model.cache_dtype,
            "tp": first.tp_size,
            "pp": first.pp_size,
            "block_tokens": sizes,
            "orders": orders,
            "token_bytes": token_bytes,
            "transport": first.transport,
        }
        if first.transport and first.transport != self._protocol:
            raise CheckFailed(f"{text}, and this side's is {self._protocol}: start both with the same protocol")
        return Verdict(text, values)

    def conversion(self) -> Verdict:
        """Say what a decode engine here would convert."""
        workers, sizes = _known(self._welcome).workers, self._wishes.sizes
        try:
            local = decode_geometry(workers, sizes, self._wishes.tokens)
            self._plans = compile_plans(local, workers, choose_sources(local, workers))
        except ValueError as error:
            raise CheckFailed(str(error)) from error
        said = describe_conversion(local, workers, self._plans)
        text = f"for rank 0 of a decode engine at TP {sizes.tensor_parallel} with the same layout: {said}"
        return Verdict(text, {"ranks_read": sorted(self._plans), "tp": sizes.tensor_parallel})

    def plan(self) -> Verdict:
        """Predict the pull of a long prompt."""
        workers, tokens = _known(self._welcome).workers, self._wishes.tokens
        local = decode_geometry(workers, self._wishes.sizes, tokens)
        local = at(local, 1 << 44, "", self._protocol, _known(workers[0].identity))
        try:
            remote_ids = imagined_blocks(workers, tokens)
        except ValueError as error:
            return Verdict(f"{error}; not predicted", outcome=Outcome.WARN)
        predicted = self._predict(local, remote_ids, tokens - 1)
        text = (
            f"{tokens} tokens in blocks that follow each other: {predicted.descriptors} descriptors, "
            f"{predicted.size / 1e6:.1f} MB, {1e3 * predicted.seconds:.1f} ms by the cost model of {self._protocol}"
        )
        return Verdict(text, {"tokens": tokens, **predicted.values()})

    def link(self) -> Verdict:
        """Connect to its transfer engines, and read a few bytes many times."""
        if self._protocol == "ascend":
            raise CheckSkipped("the Ascend transport reads into device memory only, and a visit pulls into host memory")
        from pd_connector.worker.peer import PeerAddress, connect_peer  # noqa: PLC0415  needs torch
        from pd_connector.worker.pull_end import PullFailed  # noqa: PLC0415

        remote, workers = _known(self._remote), _known(self._welcome).workers
        local = decode_geometry(workers, self._wishes.sizes, self._pull_tokens())
        self._pulling = pulling = PullTarget(self._config, local, _known(self._welcome), _known(self._client))
        self._undo.callback(pulling.close)
        address = PeerAddress(remote.remote_engine_id, remote.remote_host, remote.remote_port)
        began = time.perf_counter()
        try:
            deadline = time.monotonic() + self._config.pull_timeout_s
            self._peer = peer = connect_peer(pulling.context, address, deadline)
        except PullFailed as error:
            raise CheckFailed(f"{error.cause}: {error}") from error
        self._undo.callback(peer.close)
        connect_s = time.perf_counter() - began
        seconds = []
        for rank in peer.plans:
            size = min(_SMALL_BYTES, workers[rank].regions[0].size, pulling.region.size)
            one = [
                np.array([number], np.int64) for number in (pulling.region.address, workers[rank].regions[0].address)
            ]
            copies = Copies(one[0], one[1], np.array([size], np.int64))
            for _ in range(_SMALL_READS):
                seconds.append(_timed(lambda: peer.link(rank).read(copies, ENGINE_LIMITS.handshake_timeout_s)))  # noqa: B023
        median, worst = statistics.median(seconds), max(seconds)
        text = (
            f"ranks {sorted(peer.plans)} of {len(workers)} connected in {1e3 * connect_s:.1f} ms; {_SMALL_BYTES} bytes "
            f"in {1e6 * median:.0f} us ({1e3 * worst:.1f} ms at the worst of {len(seconds)})"
        )
        return Verdict(text, {"connect_ms": round(1e3 * connect_s, 3), "latency_us": round(1e6 * median, 1)})

    def pull(self) -> Verdict:
        """Have a prompt of some megabytes prefilled and pull it under its lease, some times."""
        pulls = [self._pull_once() for _ in range(_PULLS)]
        first, best = pulls[0], min(pulls, key=lambda one: one.read_s)
        compared = _known(self._welcome).verify
        text = (
            f"{best.tokens} tokens, {best.size / 1e6:.1f} MB in {best.descriptors} descriptors: "
            f"{best.bytes_per_s / 1e9:.2f} GB/s; {1e3 * best.read_s:.1f} ms the best of {_PULLS}, "
            f"{1e3 * first.read_s:.1f} the first, {1e3 * best.predicted_s:.1f} predicted; leases confirmed in "
            f"{1e3 * best.seconds['release']:.1f} ms; "
            + ("all checksums equal" if compared else "contents not compared: P has verify off")
        )
        values: dict[str, Any] = {
            "tokens": best.tokens,
            "bytes": best.size,
            "descriptors": best.descriptors,
            "bytes_per_s": round(best.bytes_per_s),
            "first_read_ms": round(1e3 * first.read_s, 3),
            "predicted_ms": round(1e3 * best.predicted_s, 3),
            "verified": compared,
        }
        return Verdict(text, values | {f"{phase}_ms": round(1e3 * s, 3) for phase, s in best.seconds.items()})

    def _pull_once(self) -> Pulled:
        from pd_connector.worker.pull import Pull  # noqa: PLC0415  needs torch
        from pd_connector.worker.pull_end import PullEnd, PullFailed  # noqa: PLC0415

        pulling, peer = _known(self._pulling), _known(self._peer)
        remote, _ = self._prefill(self._pull_tokens())
        sizes = remote.remote_block_sizes or [group.block_tokens for group in peer.workers[0].groups]
        try:
            ours = local_blocks(pulling.local, remote.remote_block_ids, sizes)
        except ValueError as error:
            raise CheckFailed(f"the lease does not fit the caches that were described: {error}") from error
        end_token = remote.remote_num_tokens - 1
        order = PullOrder("pd-doctor", remote, tuple(map(tuple, ours)), 0, end_token, f"pd-doctor {remote.lease_id}")
        predicted = self._predict(pulling.local, remote.remote_block_ids, end_token)
        ends: queue.SimpleQueue[Any] = queue.SimpleQueue()
        pull = Pull(pulling.context, order, ends.put, threading.Event())
        try:
            pull.run(lambda _: peer)
        except PullFailed as error:
            pull.fail(error)
        end = ends.get(timeout=self._config.pull_timeout_s + ENGINE_LIMITS.handshake_timeout_s)
        if not isinstance(end, PullEnd):
            raise CheckFailed(f"{end.end.cause}: {end.end.reason}; its reads have not settled")
        if end.cause:
            raise CheckFailed(f"{end.cause}: {end.reason}")
        del self._leases[remote.lease_id]  # this pull has used it up
        return Pulled(end.tokens, end.copied_bytes, end.descriptors, end.seconds, predicted.seconds)

    def _prefill(self, tokens: int) -> tuple[RemotePrefill, float]:
        """Return the lease of a prompt of this many tokens, and how long P took for it."""
        body = {
            "model": self._model,
            "prompt": random.choices(range(1, 100), k=tokens),  # noqa: S311  any tokens do
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        answer = self._server.ask("/v1/completions", body)
        params = answer.body.get("kv_transfer_params")
        if not params:
            raise CheckFailed(
                f"{self._server.url} has answered without kv_transfer_params: it must be a vLLM server with the "
                "PDConnector and kv_role kv_producer or kv_both"
            )
        try:
            remote = parse_remote_prefill(params)
        except ParamsError as error:
            raise CheckFailed(str(error)) from error
        self._leases[remote.lease_id] = remote
        return remote, answer.seconds

    def _pull_tokens(self) -> int:
        """Return how long a prompt must be for the bytes that are to be pulled."""
        wanted = math.ceil(self._wishes.pull_bytes / max(1.0, self._token_bytes()))
        return min(max(wanted, _LEAST_TOKENS), max(self._longest, _LEAST_TOKENS))

    def _token_bytes(self) -> float:
        """Return the bytes of a token over all layers and heads of the model."""
        one = decode_geometry(_known(self._welcome).workers, Sizes(), 1)
        return sum(plane.block_bytes / plane.block_tokens for group in one.groups for plane in group.planes)

    def _predict(self, local: WorkerGeometry, remote_ids: Any, end_token: int) -> "_Prediction":
        from pd_connector.worker.remote_reader import SLOTS  # noqa: PLC0415  needs torch
        from pd_connector.worker.transfer_engine import read_cost  # noqa: PLC0415

        workers = _known(self._welcome).workers
        sizes = [group.block_tokens for group in workers[0].groups]
        ours = tables_of(local_blocks(local, remote_ids, sizes))
        theirs = tables_of(remote_ids)
        # The slot of the staging buffer that a read of one rank is lent.
        staging_bytes = self._config.tuning.staging_bytes
        slot = Region(1 << 46, staging_bytes // SLOTS) if staging_bytes else None
        found = _Prediction()
        for rank, plan in self._plans.items():
            copies = plan.instantiate(ours, theirs, 0, end_token)
            tables = RegionTable(local.regions), RegionTable(workers[rank].regions)
            schedule = schedule_reads(copies, read_cost(self._config), *tables, slot)
            found += _Prediction(schedule.descriptors, schedule.wanted_bytes, schedule.predicted_s)
        return found

    def _renewal_s(self, remote: RemotePrefill) -> float:
        began = time.perf_counter()
        reply = self._ask(remote, Renew(remote.remote_engine_id, (remote.lease_id,)))
        seconds = time.perf_counter() - began
        if not isinstance(reply, Renewed) or remote.lease_id not in reply.valid:
            raise CheckFailed(f"lease {remote.lease_id} has ended at once: P is short of blocks, or its clock jumps")
        return seconds

    def _ask(self, remote: RemotePrefill, message: Request) -> Reply:
        client = _known(self._client)
        timeout_s = ENGINE_LIMITS.handshake_timeout_s
        try:
            return client.request(remote.remote_host, remote.remote_port, message, timeout_s).result()
        except TransferError as error:
            raise CheckFailed(str(error)) from error

    def _cancel(self, remote: RemotePrefill) -> None:
        """Let P free the blocks of a lease now; if it does not hear of it, the lease expires."""
        self._leases.pop(remote.lease_id, None)
        if self._client is not None:
            message = Cancel(remote.remote_engine_id, (remote.lease_id,))
            asked = self._client.request(remote.remote_host, remote.remote_port, message, 2.0)
            asked.exception()  # waits for the answer, whatever it is


@dataclass(frozen=True, slots=True)
class _Prediction:
    """What a pull would take, over all ranks that it reads from, one after another."""

    descriptors: int = 0
    size: int = 0
    seconds: float = 0.0

    def __add__(self, other: "_Prediction") -> "_Prediction":
        return _Prediction(self.descriptors + other.descriptors, self.size + other.size, self.seconds + other.seconds)

    def values(self) -> dict[str, Any]:
        """Return the numbers for programs."""
        return {"descriptors": self.descriptors, "bytes": self.size, "predicted_ms": round(1e3 * self.seconds, 3)}


def _known(value: _T | None) -> _T:
    """Return what an earlier check has found."""
    assert value is not None, "the checks are run in order, as long as none fails"
    return value


def _timed(call: Callable[[], object]) -> float:
    """Return how long a read takes.

    Raises:
        CheckFailed: it fails.
    """
    began = time.perf_counter()
    try:
        call()
    except ReadFailed as error:
        raise CheckFailed(str(error)) from error
    return time.perf_counter() - began
