"""What a control message costs the real server, and how many engines one P's server has time for.

The cost is the processor time of a process that does nothing but serve: a ``ControlServer`` with the connector's
``LeaseService``, and as many connections as there are engines. The rest is arithmetic: how many messages engines send.
"""

import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import zmq

from benchmarks.apart import start_apart
from layout.geometry import CacheGroup, ModelIdentity, Plane, Region, WorkerGeometry
from pd_connector.params import PromptIdentity
from pd_connector.scheduler.prefill.lease_service import LeaseService
from pd_connector.scheduler.prefill.leases import LeaseTable
from pd_connector.scheduler.prefill.transfers import Prompt
from transfer.control.client import ControlClient
from transfer.control.limits import ServerLimits
from transfer.control.messages import Follow, Hello, Release, Renew, Request, TransferState, encode
from transfer.control.server import ControlServer

HOST = "127.0.0.1"
TTL_S = 600.0
CONNECTIONS = 1000
ROUNDS = 6  # messages of each kind over every connection
MANY = 100  # leases of a long renewal
PROMPT_TOKENS, BLOCK_TOKENS, LAYERS, WORKERS = 8192, 32, 80, 8
ASKED = 300  # to time an answer
_RECEIVE_MS = 30_000
_CONTENTS, _TRANSFER = "contents", "transfer"


def serve(pipe: Connection, leases: int) -> None:
    """Be P's control server with so many leases; answer each word through the pipe with the processor time so far."""
    table: LeaseTable[None] = LeaseTable(TTL_S, time.monotonic)
    service = LeaseService(table, ModelIdentity("none", "none", "", LAYERS, 8, 128, "none", "none"), WORKERS)
    service.set_workers(tuple(_worker(rank) for rank in range(WORKERS)))
    service.transfers.open(Prompt(_TRANSFER, "growing", PromptIdentity(PROMPT_TOKENS, "")))
    service.transfers.announce(_TRANSFER, PROMPT_TOKENS // 2, [list(range(PROMPT_TOKENS // 2 // BLOCK_TOKENS))])
    for number in range(leases):
        table.grant(lease_id(number), None, _CONTENTS)
    server = ControlServer(service, HOST, limits=ServerLimits(unread_bytes=1 << 30))
    server.start()
    pipe.send((server.port, service.engine_id))
    while pipe.recv():
        pipe.send((time.process_time(), server.counters.requests))
    server.close()


def lease_id(number: int) -> str:
    """Return an id as long as real ones."""
    return f"{number:032x}"


def _worker(rank: int) -> WorkerGeometry:
    names = tuple(f"model.layers.{layer}" for layer in range(LAYERS))
    plane = Plane("kv", names, rank, 1, BLOCK_TOKENS, 256, 2, 1000, 1 << 40, 1 << 14, 1 << 21, 1 << 14, 512, 2)
    region = Region(1 << 40, 1000 << 21)
    return WorkerGeometry(rank, WORKERS, 0, 1, f"{HOST}:1", (CacheGroup(BLOCK_TOKENS, 0, (plane,)),), (region,))


def kinds(engine_id: str) -> Mapping[str, Callable[[int], Request]]:
    """Return the messages by name: each makes its ``number``-th."""
    many = tuple(lease_id(number) for number in range(MANY))
    return {
        "renew": lambda number: Renew(engine_id, (lease_id(number),)),
        "renew_many": lambda _: Renew(engine_id, many),
        "follow": lambda _: Follow(engine_id, _TRANSFER, 0, 0, TransferState.QUEUED, 0.0),
        "release": lambda number: Release(engine_id, lease_id(number), 0, 1, f"pull-{number:027}", _CONTENTS),
        "hello": lambda _: Hello(engine_id),
    }


@contextmanager
def serving(leases: int) -> Iterator[tuple[Connection, int, str]]:
    """Run ``serve`` in a process of its own; yield its pipe, its port and its engine id."""
    ours, process = start_apart(serve, leases)
    try:
        port, engine_id = ours.recv()
        yield ours, port, engine_id
    finally:
        with suppress(OSError):
            ours.send(False)
        process.join(30)


def measure(connections: int = CONNECTIONS, rounds: int = ROUNDS) -> dict[str, Any]:
    """Return the microseconds of processor time of each kind of message, and the milliseconds until an answer."""
    _raise_limits(4 * connections)
    with serving(connections * (rounds + 1)) as (pipe, port, engine_id):
        round_trip_s = _round_trip_s(port, engine_id)
        cost_us = {
            name: 1e6 * _cost_s(pipe, port, make, connections, rounds) for name, make in kinds(engine_id).items()
        }
    return {"connections": connections, "cost_us": cost_us, "round_trip_ms": 1e3 * round_trip_s,
            "leases_of_a_long_renewal": MANY, "workers_in_a_welcome": WORKERS}  # fmt: skip


def _raise_limits(files: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, hard), hard))


def _round_trip_s(port: int, engine_id: str) -> float:
    client, seconds = ControlClient(), []
    try:
        for _ in range(ASKED):
            start = time.perf_counter()
            client.request(HOST, port, Renew(engine_id, (lease_id(0),)), 10.0).result()
            seconds.append(time.perf_counter() - start)
    finally:
        client.close()
    return statistics.median(seconds)


def _cost_s(pipe: Connection, port: int, make: Callable[[int], Request], connections: int, rounds: int) -> float:
    """Return the processor time that the server takes for a message, of ``rounds`` over every connection."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, connections + 16)
    sockets = [context.socket(zmq.DEALER) for _ in range(connections)]
    try:
        for each in sockets:
            each.setsockopt(zmq.RCVTIMEO, _RECEIVE_MS)
            each.connect(f"tcp://{HOST}:{port}")
        frames = [encode(number + 1, make(number)) for number in range(connections * (rounds + 1))]
        _exchange(sockets, frames[:connections])  # the connections are there
        before, served = _used(pipe)
        for begin in range(connections, len(frames), connections):
            _exchange(sockets, frames[begin : begin + connections])
        after, served_after = _used(pipe)
        assert served_after - served == connections * rounds, "the server has not served all messages"
        return (after - before) / (connections * rounds)
    finally:
        context.destroy(linger=0)


def _exchange(sockets: Sequence["zmq.Socket[bytes]"], frames: Sequence[bytes]) -> None:
    for each, frame in zip(sockets, frames, strict=True):
        each.send(frame)
    for each in sockets:
        each.recv()


def _used(pipe: Connection) -> tuple[float, int]:
    pipe.send(True)
    seconds, requests = pipe.recv()
    return float(seconds), int(requests)


def busy(requests_per_s: float, chunks: int, cost_us: Mapping[str, float], ttl_s: float = 30.0) -> float:
    """Return the share of its time that P's server spends on one D of ``WORKERS`` workers that asks so much of it.

    A lease is renewed three times in its time to live, together with all others that the engine has there. A request
    whose legs go at once is followed once by D's scheduler, and by each worker once for each chunk; each releases it.
    """
    per_s = {
        "renew_many": 3 / ttl_s,
        "follow": requests_per_s * (1 + WORKERS * chunks),
        "release": requests_per_s * WORKERS,
    }
    return sum(number * cost_us[kind] * 1e-6 for kind, number in per_s.items())
