"""Small HTTP servers in the place of vLLM, on real sockets: they record what they get and misbehave on request.

All run on one event loop in a thread of its own. What a server does with a request is its ``script``, a coroutine
function over (what was received, the wire to answer on), which a test may replace at any time.
"""

import asyncio
import contextlib
import json
import socket
import ssl
import struct
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

TRANSFER: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "engine-1",
    "remote_block_ids": [[3, 4, 5]],
    "remote_host": "::1",
    "remote_port": 4711,
    "lease_id": "unknown to every router",
}


#: Tokens of a prompt and its answer, of servers that say it.
ROOM = 9
#: Of a connector whose transfers can be followed by their names.
NAMED_TRANSFER: dict[str, Any] = TRANSFER | {"remote_attempt": 0}
#: With which vLLM begins a chat's stream and a message's when the engine has told anything, be it that it has failed.
ROLE_CHUNK = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":8,"model":"tiny","choices":[{"index":0,'
    b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
)
MESSAGE_START = b'event: message_start\ndata: {"type":"message_start","message":{"content":[],"usage":{}}}\n\n'


class Received:
    """One request as a server got it."""

    def __init__(self, method: str, path: str, headers: dict[str, str], content: bytes) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.content = content
        self.body: Any = json.loads(content) if content[:1] in (b"{", b"[") else None
        self.left = threading.Event()  # the peer closed the connection before the answer was complete


class Wire:
    """What a script answers on."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def raw(self, content: bytes) -> None:
        self._writer.write(content)
        await self._writer.drain()

    async def head(self, status: int = 200, headers: dict[str, str] | None = None) -> None:
        lines = [f"HTTP/1.1 {status} Whatever"]
        lines += [f"{name}: {value}" for name, value in (headers or {"Content-Type": "text/event-stream"}).items()]
        await self.raw("\r\n".join([*lines, "Transfer-Encoding: chunked", "", ""]).encode())

    async def chunk(self, content: bytes) -> None:
        await self.raw(b"%x\r\n%s\r\n" % (len(content), content))

    async def end(self) -> None:
        await self.raw(b"0\r\n\r\n")

    async def whole(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(content)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {"Content-Type": "application/json"}).items()]
        await self.raw("\r\n".join([*lines, "", ""]).encode() + content)

    async def json(self, status: int, body: object) -> None:
        await self.whole(status, json.dumps(body).encode())

    def drop(self) -> None:
        """Close the connection where it stands."""
        self._writer.close()

    def reset(self) -> None:
        """Close the connection as the kernel does if something was not read."""
        connection: socket.socket = self._writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


Script = Callable[[Received, Wire], Awaitable[None]]


class PrefillLegs:
    """The transfers for which a prefill leg has arrived at any of the servers on a loop.

    No decode server can serve a leg before its prompt has reached a prefill server, so no fake one does: tests may rely
    on it. Where the prompt never arrives, the fake one waits no longer than ``longest_s``.
    """

    def __init__(self, longest_s: float = 2) -> None:
        self._longest_s = longest_s
        self._arrived: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def precede(self, received: Received) -> None:
        """Note a prefill leg; let a decode leg wait for it. Other requests are let through."""
        parameters = received.body.get("kv_transfer_params") if isinstance(received.body, dict) else None
        if not isinstance(parameters, dict) or "transfer_id" not in parameters:
            return
        arrived = self._arrived[str(parameters["transfer_id"])]
        if parameters.get("do_remote_decode"):
            arrived.set()
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(arrived.wait(), self._longest_s)


class FakeServer:
    """One server on a free port of the loopback address."""

    def __init__(self, script: Script, legs: PrefillLegs) -> None:
        self.script = script
        self._legs = legs
        self.received: list[Received] = []  # but for what asks for metrics
        self.metrics: bytes | None = b""  # None: whoever asks for them is cut off
        self.url = ""
        self._arrival = threading.Condition()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def bodies(self) -> list[Any]:
        """The JSON bodies of all requests so far."""
        return [one.body for one in self.received]

    def wait(self, count: int = 1) -> Received:
        """The ``count``-th request, once it is there."""
        with self._arrival:
            assert self._arrival.wait_for(lambda: len(self.received) >= count, timeout=30), "no request came"
            return self.received[count - 1]

    async def start(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", port, backlog=1024, ssl=tls)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        for listening in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        # A connection that was just taken has its task a few turns later, and none if its server is closed by then:
        # asyncio would drop it without closing it.
        for _ in range(10):
            await asyncio.sleep(0)
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            early = b""
            while not writer.is_closing():
                received = await _read(early, reader)
                if received.path != "/metrics":
                    with self._arrival:
                        self.received.append(received)
                        self._arrival.notify_all()
                early = await self._answer(received, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """Run the script; note when the peer leaves. Returns what the peer already sent of its next request."""
        script = asyncio.ensure_future(self._serve(received, Wire(writer)))
        watch = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((script, watch), return_when=asyncio.FIRST_COMPLETED)
            if not script.done() or isinstance(script.exception(), ConnectionError):
                received.left.set()
                raise ConnectionError
            script.result()
            return watch.result() if watch.done() else b""
        finally:
            script.cancel()
            watch.cancel()
            await asyncio.gather(script, watch, return_exceptions=True)

    async def _serve(self, received: Received, wire: Wire) -> None:
        if received.path == "/metrics":
            await wire.whole(200, self.metrics) if self.metrics is not None else wire.drop()
            return
        await self._legs.precede(received)
        await self.script(received, wire)


async def _read(early: bytes, reader: asyncio.StreamReader) -> Received:
    head = early + await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    content = await reader.readexactly(int(headers.get("content-length", "0")))
    method, path, _ = first.split(" ")
    return Received(method, path, headers, content)


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake servers")
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def prefills(received: Received, wire: Wire) -> None:
    """What a healthy prefill server does."""
    if received.path == "/health":
        await wire.whole(200, b"")
    else:
        await wire.json(200, {"choices": [{"finish_reason": "length"}], "kv_transfer_params": TRANSFER})


async def prefills_by_name(received: Received, wire: Wire) -> None:
    """What a healthy prefill server does whose connector lets transfers be followed by their names."""
    if received.path == "/health":
        await wire.whole(200, b"")
    else:
        await wire.json(200, {"choices": [{"finish_reason": "length"}], "kv_transfer_params": NAMED_TRANSFER})


async def decodes(received: Received, wire: Wire) -> None:
    """What a healthy decode server does."""
    if received.path == "/health":
        await wire.whole(200, b"")
    elif received.path == "/v1/models":
        await wire.json(200, {"object": "list", "data": [{"id": "tiny", "max_model_len": ROOM}, {"id": "an-adapter"}]})
    else:
        await wire.json(200, {"choices": [{"text": " the answer"}]})


async def stalls(_: Received, __: Wire) -> None:
    """Take the request and stay silent."""
    await asyncio.Event().wait()


async def drops(_: Received, wire: Wire) -> None:
    """Take the request and close the connection."""
    wire.drop()


async def resets(_: Received, wire: Wire) -> None:
    """Close the connection as if the request had not been read."""
    wire.reset()


def answers(status: int, content: bytes, **headers: str) -> Script:
    """Answer every request with this."""

    async def script(_: Received, wire: Wire) -> None:
        shown = {name.replace("_", "-"): value for name, value in headers.items()}
        await wire.whole(status, content, shown or None)

    return script


async def opened(gate: threading.Event) -> None:
    """Wait on the loop for an event that a test sets in its own thread."""
    while not gate.is_set():
        await asyncio.sleep(0.002)


def waits(gate: threading.Event, then: Script) -> Script:
    """A server that does what another does once ``gate`` is set."""

    async def script(received: Received, wire: Wire) -> None:
        await opened(gate)
        await then(received, wire)

    return script
