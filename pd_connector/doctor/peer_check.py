"""The checks of a running P, in the order in which a decode engine meets it; each needs those before it.

A stranger gets no lease over the control channel: leases are granted to requests. So P is sent some over its HTTP port,
as a router sends them: a short one, to learn who it is, and some whose blocks are pulled.

They are pulled as a decode engine of P's own size pulls them: by a worker for each rank of P, whose caches are P's,
but dense, of few blocks, and in this process's host memory.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from layout.compatibility import check_transports
from layout.conversion import physical_order
from layout.geometry import WorkerGeometry
from layout.scratch import blocks_holding, scratch_bytes, scratch_geometry
from pd_connector.config import ConnectorConfig
from pd_connector.doctor.findings import Check, CheckFailed, CheckSkipped
from pd_connector.doctor.http import HttpServer
from pd_connector.engine_limits import ENGINE_LIMITS
from pd_connector.orders import Cause, Orders, PullOrder, cause_of
from pd_connector.params import ParamsError, RemotePrefill, parse_remote_prefill
from pd_connector.secret import load_keys
from transfer.control.client import ControlClient
from transfer.control.messages import Cancel, Hello, Welcome
from transfer.errors import TransferError
from transfer.memory import HostMemory
from transfer.peers import AllowedPeers

if TYPE_CHECKING:
    from pd_connector.worker.pull_end import PullEnd

LEAST_TOKENS = 2  # of a prompt: the last one is never pulled
_SHORT_PROMPT = 8  # tokens
_PULLS = 3
_CANCEL_TIMEOUT_S = 2.0
#: Of a read that failed, though the first bytes, a few, have come: the link compares the peer's number.
_LOST = ". Small reads work: does the way lose large packets (an MTU below this machine's, of which nobody is told)?"
_LOOK_S = 0.001  # between two looks whether pulls have ended


class PeerCheck:
    """Checks one P. Owns its control client, its workers and its leases until ``close``."""

    def __init__(self, server: HttpServer, config: ConnectorConfig, tokens: int) -> None:
        """Send nothing yet.

        Args:
            server: P's HTTP port.
            config: of a decode engine on this machine, with its host and protocol.
            tokens: of a prompt that is pulled, unless P serves shorter ones only.
        """
        self._server = server
        self._config = config
        self._tokens = tokens
        self._model = ""
        self._leases: dict[str, RemotePrefill] = {}  # that have not ended
        self._client: ControlClient | None = None
        self._welcome: Welcome | None = None
        self._workers: _DecodeWorkers | None = None

    @property
    def checks(self) -> list[tuple[str, Check]]:
        """All of them, in order."""
        return [("peer", self.peer), ("peer: handshake", self.handshake), ("peer: pull", self.pull)]

    def close(self) -> None:
        """Give back the leases that are left, and end everything."""
        for remote in list(self._leases.values()):
            self._cancel(remote)
        if self._workers is not None:
            self._workers.close()
        if self._client is not None:
            self._client.close()

    def peer(self) -> str:
        """Ask the server for its model, have it prefill a short prompt, and look at what it leases."""
        models = self._server.ask("/v1/models").get("data")
        if not isinstance(models, list) or not models or not isinstance(models[0], dict) or "id" not in models[0]:
            raise CheckFailed(f"{self._server.url}/v1/models names no model: is it a vLLM server?")
        self._model, longest = str(models[0]["id"]), models[0].get("max_model_len")
        if isinstance(longest, int):
            self._tokens = max(min(self._tokens, longest - 1), LEAST_TOKENS)
        remote = self._prefill(min(_SHORT_PROMPT, self._tokens))
        return (
            f"{self._server.url} serves {self._model!r}; engine {remote.remote_engine_id} leases for "
            f"{remote.lease_ttl_s:g} s, its control channel is at {remote.engine.at}"
        )

    def handshake(self) -> str:
        """Ask for its caches over the control channel, with this side's secret, and give the lease back."""
        (remote,) = self._leases.values()
        keys = load_keys(self._config.secret_file)
        self._client = client = ControlClient(keys=keys, allowed=AllowedPeers(self._config.allowed_peers))
        hello, timeout_s = Hello(remote.remote_engine_id), ENGINE_LIMITS.handshake_timeout_s
        began = time.perf_counter()
        try:
            welcome = client.request(remote.remote_host, remote.remote_port, hello, timeout_s).result()
        except TransferError as error:
            raise CheckFailed(f"{cause_of(error)}: {error}") from error
        milliseconds = 1e3 * (time.perf_counter() - began)
        self._cancel(remote)
        self._welcome = welcome
        workers = welcome.workers
        try:
            check_transports(replace(workers[0], transport=self._config.protocol), workers)
        except ValueError as error:
            raise CheckFailed(str(error)) from error
        secret = "without a secret" if keys is None else "authenticated and encrypted"
        return f"{milliseconds:.1f} ms, {secret}; {welcome.model.architecture}, {_describe(workers)}"

    def pull(self) -> str:
        """Have some prompts prefilled, and pull them under their leases."""
        if self._config.protocol == "ascend":
            raise CheckSkipped(
                "the Ascend transport reads into device memory only, and the doctor pulls into host memory"
            )
        assert self._welcome is not None, "the checks are run in order, as long as none fails"
        assert self._client is not None, "it was made for the handshake"
        self._workers = workers = _DecodeWorkers(self._config, self._welcome, self._client, self._tokens)
        pulls = []
        for _ in range(_PULLS):
            remote = self._prefill(self._tokens)
            pulls.append(workers.pull(remote))
            del self._leases[remote.lease_id]  # the pull has used it up
        seconds = [max(end.seconds["read"] for end in ends) for ends in pulls]
        best, ends = max(min(seconds), 1e-9), pulls[-1]
        size, descriptors = sum(end.copied_bytes for end in ends), sum(end.descriptors for end in ends)
        proven = "all checksums equal" if workers.compares else "contents not compared: P has verify off"
        return (
            f"{ends[0].tokens} tokens, {size / 1e6:.1f} MB in {descriptors} descriptors, by {len(ends)} workers: "
            f"{size / best / 1e9:.2f} GB/s; {1e3 * best:.1f} ms the best of {_PULLS}, {1e3 * seconds[0]:.1f} the "
            f"first; leases confirmed in {1e3 * max(end.seconds['release'] for end in ends):.1f} ms; {proven}"
        )

    def _prefill(self, tokens: int) -> RemotePrefill:
        """Return the lease of a prompt of this many tokens."""
        body = {
            "model": self._model,
            "prompt": random.choices(range(1, 100), k=tokens),  # noqa: S311  any tokens do
            "max_tokens": 1,
            "temperature": 0,
            "ignore_eos": True,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        params = self._server.ask("/v1/completions", body).get("kv_transfer_params")
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
        return remote

    def _cancel(self, remote: RemotePrefill) -> None:
        """Let P free the blocks of a lease now; if it does not hear of it, the lease expires."""
        del self._leases[remote.lease_id]
        message = Cancel(remote.remote_engine_id, (remote.lease_id,))
        if self._client is not None:
            asked = self._client.request(remote.remote_host, remote.remote_port, message, _CANCEL_TIMEOUT_S)
            asked.exception()  # waits for the answer, whatever it is


class _DecodeWorkers:
    """The pulling part of the workers of a decode engine, each with the caches of one rank of P."""

    def __init__(self, config: ConnectorConfig, welcome: Welcome, client: ControlClient, tokens: int) -> None:
        """Start the transfer engine, and register memory for a prompt of ``tokens``.

        Raises:
            EngineStartError: the transfer engine does not start, or refuses the memory.
        """
        from pd_connector.worker.lease_checksums import CacheChecksums  # noqa: PLC0415
        from pd_connector.worker.peer import PullContext  # noqa: PLC0415  needs torch
        from pd_connector.worker.pulls import Pulls  # noqa: PLC0415
        from pd_connector.worker.remote_reader import RemoteReader  # noqa: PLC0415
        from pd_connector.worker.transfer_engine import open_engine, read_cost  # noqa: PLC0415
        from pd_connector.worker.verification import Verifier  # noqa: PLC0415

        self.compares = welcome.verify or config.verify
        self._timeout_s = config.pull_timeout_s + ENGINE_LIMITS.handshake_timeout_s
        self._transport = config.protocol
        self._engine = engine = open_engine(config, is_read=False)
        self._memory: list[HostMemory] = []
        self._workers: list[Pulls] = []
        try:
            caches = [self._scratch(worker, tokens) for worker in welcome.workers]
            regions = tuple(region for geometry in caches for region in geometry.regions)
            engine.register(regions)
            context = PullContext(
                local=caches[0],
                model=welcome.model,
                engine=engine,
                client=client,
                allowed=AllowedPeers(config.allowed_peers),
                reader=0,
                readers=len(caches),
                reads=RemoteReader(read_cost(config), regions),
                handshake_timeout_s=ENGINE_LIMITS.handshake_timeout_s,
                pull_timeout_s=config.pull_timeout_s,
            )
            for reader, local in enumerate(caches):
                verifier = Verifier(CacheChecksums(local), client) if self.compares else None
                own = replace(context, local=local, reader=reader, verifier=verifier)
                self._workers.append(Pulls(own, ENGINE_LIMITS.peer_idle_s))
        except BaseException:
            self.close()
            raise

    def pull(self, remote: RemotePrefill) -> "list[PullEnd]":
        """Pull a prompt on all workers at once; return how that ended on each.

        Raises:
            CheckFailed: it failed on a worker, or has not settled in time.
        """
        blocks = tuple(
            tuple(here if there else 0 for here, there in enumerate(ids, 1)) for ids in remote.remote_block_ids
        )
        end_token, pull_id = remote.remote_num_tokens - 1, f"pd-doctor {remote.lease_id}"
        order = PullOrder("pd-doctor", remote, blocks, 0, end_token, pull_id)
        for worker in self._workers:
            worker.execute(Orders(pulls=(order,)))
        ends: list[PullEnd] = []
        deadline = time.monotonic() + self._timeout_s
        while len(ends) < len(self._workers):
            if time.monotonic() > deadline:
                raise CheckFailed(f"its reads have not settled for {self._timeout_s:g} s")
            time.sleep(_LOOK_S)
            ends += [end for worker in self._workers for end in worker.take_ends()]
        if failed := next((end for end in ends if end.cause), None):
            raise CheckFailed(
                f"{failed.cause}: {failed.reason}{_LOST if failed.cause in (Cause.READ, Cause.TIMEOUT) else ''}"
            )
        return ends

    def close(self) -> None:
        """End reads and threads, and the control client."""
        for worker in self._workers:
            worker.close()
        self._engine.close()  # which ends reads
        for worker in self._workers:
            worker.join()

    def _scratch(self, worker: WorkerGeometry, tokens: int) -> WorkerGeometry:
        """Return dense caches like a rank's, of so many blocks as ``tokens`` take, with this side's transfer engine."""
        blocks = [blocks_holding(tokens, group.block_tokens) for group in worker.groups]
        engine = self._engine
        memory = HostMemory(max(scratch_bytes(worker, blocks), 1))
        memory.allocate()
        self._memory.append(memory)
        own = replace(worker, engine_address=engine.address, transport=self._transport, identity=engine.identity)
        return scratch_geometry(own, memory.region, blocks)


def _describe(workers: Sequence[WorkerGeometry]) -> str:
    """Return what the caches of a P are, for people."""
    first = workers[0]
    sizes = sorted({group.block_tokens for group in first.groups})
    orders = sorted({physical_order(plane) for group in first.groups for plane in group.planes})
    return (
        f"TP {first.tp_size}, PP {first.pp_size}, blocks of {'/'.join(map(str, sizes))} tokens in order "
        f"{'/'.join(orders)}, transport {first.transport or 'unknown'}"
    )
