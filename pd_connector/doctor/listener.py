"""What stands in P's place on a machine where no engine runs yet: leases over noise, by the prefill side's own classes.

``Listener`` serves a control channel and a transfer engine as a prefill engine does, and on an HTTP port the two
questions that the doctor asks a vLLM server. ``serve_apart`` has one in a process of its own, because a library that
crashes takes its process with it.
"""

import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from layout.geometry import CacheGroup, ModelIdentity, Plane, Region, WorkerGeometry
from pd_connector.config import ConnectorConfig
from pd_connector.doctor import npu
from pd_connector.doctor.findings import CheckFailed
from pd_connector.orders import ChecksumReport
from pd_connector.params import is_prefill_leg
from pd_connector.scheduler.prefill.lease_service import LeaseService
from pd_connector.scheduler.prefill.leases import LeaseTable
from pd_connector.secret import load_keys
from pd_connector.worker.lease_checksums import CacheChecksums
from transfer.control.server import ControlServer
from transfer.engine.interface import TransferEngine
from transfer.memory import HostMemory, bytes_of
from transfer.peers import Address, resolve

logger = logging.getLogger(__name__)

MODEL_NAME = "pd-doctor"
_LAYERS, _HEADS, _BLOCKS, _BLOCK_TOKENS, _CONTENT, _ITEM_BYTES = 8, 8, 129, 16, 256, 2  # 64 MiB
_MOST_TOKENS = (_BLOCKS - 1) * _BLOCK_TOKENS
_MAX_BODY_BYTES = 1 << 20
_START_TIMEOUT_S = 120.0


class Listener(ThreadingHTTPServer):
    """Leases the same noise to whoever asks. Owns its engine, its servers and its memory until ``close``."""

    daemon_threads = True

    def __init__(self, config: ConnectorConfig, http_port: int) -> None:
        """Start all of it. ``config`` has the host and the protocol.

        Raises:
            EngineStartError, ControlStartError, ConfigError, ImportError, OSError: it does not start.
        """
        from pd_connector.worker.transfer_engine import open_engine  # noqa: PLC0415  needs torch

        self._host = host = str(config.host)
        ip = resolve(host)
        self.address_family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        with ExitStack() as undo:
            engine = undo.enter_context(closing(open_engine(config, is_read=True)))
            self._memory = HostMemory(_plane(0).block_bytes * _BLOCKS)
            region = self._memory.region
            _fill(region)
            engine.register([region])
            groups = (CacheGroup(_BLOCK_TOKENS, 0, (_plane(region.address),)),)
            geometry = WorkerGeometry(0, 1, 0, 1, engine.address, groups, (region,), config.protocol, engine.identity)
            self._checksums = CacheChecksums(geometry)
            self._leases: LeaseTable[str] = LeaseTable(config.lease_ttl_s, time.monotonic)
            model = ModelIdentity(MODEL_NAME, "", "", _LAYERS, _HEADS, _CONTENT // 2, "bfloat16", "bfloat16")
            self._service = LeaseService(self._leases, model, 1, verify=True)
            self._service.set_workers((geometry,))
            control = ControlServer(self._service, host, config.port, keys=load_keys(config.secret_file))
            self._control = undo.enter_context(closing(control))
            self._control.start()
            self._granting = threading.Lock()
            super().__init__((ip, http_port), _Handler)
            undo.callback(self.server_close)
            thread = threading.Thread(target=self.serve_forever, name="pd-doctor-http", daemon=True)
            thread.start()
            undo.callback(thread.join)
            undo.callback(self.shutdown)
            self._release = undo.pop_all()

    @property
    def address(self) -> str:
        """Where a doctor's ``--peer`` finds it."""
        return str(Address(self._host, int(self.server_address[1])))

    def lease(self, tokens: list[int]) -> dict[str, Any]:
        """Return the ``kv_transfer_params`` of a new lease over the blocks of a prompt.

        Raises:
            ValueError: the prompt is empty or too long.
        """
        if not 0 < len(tokens) <= _MOST_TOKENS:
            raise ValueError(f"a prompt must have 1 to {_MOST_TOKENS} tokens, not {len(tokens)}")
        blocks = list(range(1, 1 + -(-len(tokens) // _BLOCK_TOKENS)))
        with self._granting:
            self._leases.collect()
            prompt: Any = SimpleNamespace(  # what a lease needs of a request
                request_id=uuid.uuid4().hex, prompt_token_ids=tokens, num_prompt_tokens=len(tokens),
                prompt_embeds=None, lora_request=None, mm_features=(),
            )  # fmt: skip
            params = self._service.grant(prompt, [blocks], prompt.request_id, (self._host, self._control.port))
            for order in self._service.checksums.take_orders():
                sums = self._checksums.sums(order.block_ids, 0, order.end_token, threading.Event())
                self._service.checksums.add(ChecksumReport(order.lease_id, 0, sums))
        return params

    def close(self) -> None:
        """End all of it."""
        self._release.close()


def _plane(address: int) -> Plane:
    """Return the only plane: K and V of a small model, all layers of a block together."""
    token = _CONTENT * _ITEM_BYTES
    layer = _BLOCK_TOKENS * token
    head = _LAYERS * layer
    layers = tuple(f"layer.{number}" for number in range(_LAYERS))
    return Plane(
        "kv", layers, 0, _HEADS, _BLOCK_TOKENS, _CONTENT, _ITEM_BYTES, _BLOCKS, address,
        layer_stride=layer, block_stride=_HEADS * head, head_stride=head, token_stride=token,
        content_stride=_ITEM_BYTES, total_heads=_HEADS,
    )  # fmt: skip


def _fill(region: Region) -> None:
    """Fill memory with noise, so that no two places of it look alike."""
    bytes_of(region)[:] = np.frombuffer(np.random.default_rng().bytes(region.size), np.uint8)


class _Handler(BaseHTTPRequestHandler):
    """Answers the doctor's two questions as vLLM's server does."""

    server: Listener
    timeout = 10.0

    def do_GET(self) -> None:
        """Name the model."""
        self._answer({"object": "list", "data": [{"id": MODEL_NAME, "max_model_len": _MOST_TOKENS + 1}]})

    def do_POST(self) -> None:
        """Lease a prompt."""
        try:
            body = json.loads(self.rfile.read(min(int(self.headers["Content-Length"]), _MAX_BODY_BYTES)))
            if not is_prefill_leg(body["kv_transfer_params"]):
                raise ValueError("only prefill legs are served here")
            params = self.server.lease([int(token) for token in body["prompt"]])
        except (ValueError, TypeError, KeyError) as error:
            self.send_error(HTTPStatus.BAD_REQUEST, explain=f"{type(error).__name__}: {error}")
        else:
            self._answer({"choices": [{"text": ""}], "kv_transfer_params": params})

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  named by the base class
        """Log where everything is logged."""
        logger.info("%s " + format, self.address_string(), *args)

    def _answer(self, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _ascend_engine(config: ConnectorConfig) -> TransferEngine:
    """Start a transfer engine, which registers memory of the first NPU: over Ascend, peers can read no other."""
    from pd_connector.worker.transfer_engine import open_engine  # noqa: PLC0415  needs torch

    npu.device()
    return open_engine(config, is_read=True)


class Served(Protocol):
    """What a process of its own holds for another one to find."""

    @property
    def address(self) -> str:
        """Where it is."""

    def close(self) -> None:
        """End it."""


def _start(config: ConnectorConfig) -> Served:
    return _ascend_engine(config) if config.protocol == "ascend" else Listener(config, 0)


def _serve(parent: Connection, start: Callable[[], Served]) -> None:
    """Serve in this process until the other end of ``parent`` closes."""
    try:
        served = start()
    except Exception as error:  # whatever it is, the parent has to say it
        parent.send(f"{type(error).__name__}: {error}")
        return
    with closing(served), suppress(EOFError):
        parent.send({"address": served.address})
        parent.recv()


def serve_apart(config: ConnectorConfig) -> AbstractContextManager[str]:
    """Return a context with the address of a listener in a process of its own, on ports that the system chooses.

    Over Ascend, it is that of a transfer engine alone.

    Raises:
        CheckFailed: it does not start.
    """
    return serving_apart(partial(_start, config.model_copy(update={"port": 0})), config.protocol)


@contextmanager
def serving_apart(start: Callable[[], Served], what: str) -> Iterator[str]:
    """Yield the address of what ``start`` returns in a process of its own.

    Raises:
        CheckFailed: it does not start; the message names ``what``.
    """
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, start), name="pd-doctor-listener")
    process.start()
    theirs.close()
    try:
        try:
            said = ours.recv() if ours.poll(_START_TIMEOUT_S) else f"nothing within {_START_TIMEOUT_S:.0f} s"
        except EOFError:
            said = "its process has ended without a word: the library crashed"
        if not isinstance(said, dict):
            raise CheckFailed(f"{what} does not start: {said}")
        yield said["address"]
    finally:
        ours.close()
        process.join(10.0)
        process.kill()
        process.join()
