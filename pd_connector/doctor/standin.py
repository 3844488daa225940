"""What stands in P's place on a machine where no engine runs yet: leases over noise, by the prefill side's own classes.

``Listener`` serves a control channel and a transfer engine as a prefill engine does, and on an HTTP port the two
questions that the doctor asks a vLLM server. ``serve_apart`` has one in a process of its own.
"""

import ctypes
import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from layout.geometry import CacheGroup, ModelIdentity, Plane, Region, WorkerGeometry
from pd_connector.config import ConnectorConfig
from pd_connector.doctor.findings import CheckFailed
from pd_connector.orders import ChecksumReport
from pd_connector.params import is_prefill_leg
from pd_connector.scheduler.lease_service import LeaseService
from pd_connector.scheduler.leases import LeaseTable
from pd_connector.secret import load_keys
from pd_connector.worker.checksums import CacheChecksums
from transfer.control.server import ControlServer
from transfer.engine.mooncake import MooncakeEngine, MooncakeOptions
from transfer.memory import HostMemory
from transfer.peers import Address

logger = logging.getLogger(__name__)

MODEL_NAME = "pd-doctor"
_LAYERS, _HEADS, _BLOCKS, _BLOCK_TOKENS, _CONTENT, _ITEM_BYTES = 8, 8, 129, 16, 256, 2  # 64 MiB
_MOST_TOKENS = (_BLOCKS - 1) * _BLOCK_TOKENS
_MAX_BODY_BYTES = 1 << 20
_START_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class _Prompt:
    """What a lease needs of a request."""

    request_id: str
    prompt_token_ids: list[int]
    lora_request: None = None
    mm_features: tuple[()] = ()
    prompt_embeds: None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens."""
        return len(self.prompt_token_ids)


class Listener:
    """Leases the same noise to whoever asks. Owns its engine, its servers and its memory until ``close``."""

    def __init__(self, config: ConnectorConfig, host: str, protocol: str, http_port: int) -> None:
        """Start all of it.

        Raises:
            EngineStartError, ControlStartError, ConfigError, OSError: it does not start.
        """
        with ExitStack() as undo:
            self._engine = MooncakeEngine(MooncakeOptions(host, protocol, config.devices))
            undo.callback(self._engine.close)
            self._memory = HostMemory(_plane(0).block_bytes * _BLOCKS)
            region = self._memory.region
            _fill(region)
            self._engine.register([region])
            groups = (CacheGroup(_BLOCK_TOKENS, 0, (_plane(region.address),)),)
            identity = self._engine.identity
            geometry = WorkerGeometry(0, 1, 0, 1, self._engine.address, groups, (region,), protocol, identity)
            self._checksums = CacheChecksums(geometry)
            self._leases: LeaseTable[str] = LeaseTable(config.lease_ttl_s, time.monotonic)
            model = ModelIdentity(MODEL_NAME, "", "", _LAYERS, _HEADS, _CONTENT // 2, "bfloat16", "bfloat16")
            self._service = LeaseService(self._leases, model, 1, verify=True)
            self._service.set_workers((geometry,))
            self._control = ControlServer(self._service, host, config.port, keys=load_keys(config.secret_file))
            undo.callback(self._control.close)
            self._control.start()
            self._host = host
            self._granting = threading.Lock()
            self._http = _Server((host, http_port), self)
            undo.callback(self._http.server_close)
            self._thread = threading.Thread(target=self._http.serve_forever, name="pd-doctor-http", daemon=True)
            self._thread.start()
            undo.callback(self._http.shutdown)
            self._release = undo.pop_all()

    @property
    def address(self) -> str:
        """Where a doctor's ``--peer`` finds it."""
        return str(Address(self._host, int(self._http.server_address[1])))

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
            prompt: Any = _Prompt(uuid.uuid4().hex, tokens)
            params = self._service.grant(prompt, [blocks], prompt.request_id, (self._host, self._control.port))
            for order in self._service.checksums.take_orders():
                sums = self._checksums.sums(order.block_ids, 0, order.end_token, threading.Event())
                self._service.checksums.add(ChecksumReport(order.lease_id, 0, sums))
        return params

    def close(self) -> None:
        """End all of it."""
        self._release.close()
        self._thread.join()


def _plane(address: int) -> Plane:
    """Return the only plane: K and V of a small model, all layers of a block together."""
    token = _CONTENT * _ITEM_BYTES
    layer = _BLOCK_TOKENS * token
    head = _LAYERS * layer
    return Plane(
        part="kv",
        layers=tuple(f"layer.{number}" for number in range(_LAYERS)),
        head_start=0,
        heads=_HEADS,
        block_tokens=_BLOCK_TOKENS,
        content=_CONTENT,
        item_size=_ITEM_BYTES,
        blocks=_BLOCKS,
        address=address,
        layer_stride=layer,
        block_stride=_HEADS * head,
        head_stride=head,
        token_stride=token,
        content_stride=_ITEM_BYTES,
        total_heads=_HEADS,
    )


def _fill(region: Region) -> None:
    """Fill memory with noise, so that no two places of it look alike."""
    view = np.ctypeslib.as_array((ctypes.c_uint8 * region.size).from_address(region.address))
    view[:] = np.frombuffer(np.random.default_rng().bytes(region.size), np.uint8)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], listener: Listener) -> None:
        self.address_family = _family(address[0])
        self.listener = listener
        super().__init__(address, _Handler)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class _Handler(BaseHTTPRequestHandler):
    """Answers the doctor's questions as vLLM's server does."""

    server: _Server
    timeout = 10.0

    def do_GET(self) -> None:
        """Name the model."""
        if self.path == "/v1/models":
            model = {"id": MODEL_NAME, "object": "model", "max_model_len": _MOST_TOKENS + 1}
            self._answer(HTTPStatus.OK, {"object": "list", "data": [model]})
        else:
            self._answer(HTTPStatus.NOT_FOUND, {"error": {"message": f"there is no {self.path} here"}})

    def do_POST(self) -> None:
        """Lease a prompt."""
        try:
            body = json.loads(self.rfile.read(min(int(self.headers["Content-Length"]), _MAX_BODY_BYTES)))
            if self.path != "/v1/completions" or not is_prefill_leg(body["kv_transfer_params"]):
                raise ValueError("only the prefill leg of /v1/completions is served here")
            params = self.server.listener.lease([int(token) for token in body["prompt"]])
        except (ValueError, TypeError, KeyError) as error:
            self._answer(HTTPStatus.BAD_REQUEST, {"error": {"message": f"{type(error).__name__}: {error}"}})
            return
        self._answer(HTTPStatus.OK, {"choices": [{"text": ""}], "kv_transfer_params": params})

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  named by the base class
        """Log where everything is logged."""
        logger.info("%s " + format, self.address_string(), *args)

    def _answer(self, status: HTTPStatus, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _serve(parent: Connection, config: ConnectorConfig, host: str, protocol: str) -> None:
    """Serve in this process until the other end of ``parent`` closes."""
    try:
        listener = Listener(config, host, protocol, 0)
    except Exception as error:  # whatever it is, the parent has to say it
        parent.send(f"{type(error).__name__}: {error}")
        return
    try:
        parent.send({"address": listener.address})
        parent.recv()
    except EOFError:
        pass
    finally:
        listener.close()


@contextmanager
def serve_apart(config: ConnectorConfig, host: str, protocol: str) -> Iterator[str]:
    """Yield the address of a listener in a process of its own, on ports that the system chooses.

    Raises:
        CheckFailed: it does not start.
    """
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    config = config.model_copy(update={"port": 0})
    process = context.Process(target=_serve, args=(theirs, config, host, protocol), name="pd-doctor-listener")
    process.start()
    theirs.close()
    try:
        try:
            said = ours.recv() if ours.poll(_START_TIMEOUT_S) else f"nothing within {_START_TIMEOUT_S:.0f} s"
        except EOFError:
            said = "nothing: its process has ended"
        if not isinstance(said, dict):
            raise CheckFailed(f"the second process did not start: {said}")
        yield said["address"]
    finally:
        ours.close()
        process.join(10.0)
        process.kill()
        process.join()
