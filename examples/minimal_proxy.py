"""A router for prefill/decode disaggregation in one file, to read and to copy.

    python examples/minimal_proxy.py --prefill http://P:8100 --decode http://D:8200 [--control P:8998]

P computes the prompt and one token, and answers where its KV cache lies (``kv_transfer_params``). D gets the client's
request with that, fetches it, and answers the client. With P's control channel (its setting ``port``), both get their
legs at once, under a name: D fetches each chunk of the prompt while P computes the next.
"""

import argparse
import json
import logging
import resource
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import httpx
import uvicorn
from anyio.abc import TaskGroup
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

#: Exactly one token: of a text that ends before it, P hands nothing over.
FOR_P: dict[str, Any] = {"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "ignore_eos": True, "stream": False}
#: Could end the text all the same, or is refused beside one token. All else may be a part of the prompt, and stays.
NOT_FOR_P = {"stream_options", "min_tokens", "stop", "stop_token_ids", "repetition_detection", "best_of"}


def is_one_prompt(body: dict[str, Any]) -> bool:
    """Return whether one prompt is continued, and D need not compute it; D serves anything else alone."""
    prompt, limits = body.get("prompt"), (body.get("max_tokens"), body.get("max_completion_tokens"))
    prompts = isinstance(prompt, list) and len(prompt) != 1 and not all(isinstance(token, int) for token in prompt)
    computed = body.get("prompt_embeds") or body.get("echo") or body.get("prompt_logprobs") is not None
    apart = body.get("truncate_prompt_tokens") == -1  # P, which is to give one token, would cut elsewhere
    return not (prompts or body.get("use_beam_search") or computed or apart or 0 in limits)


class Completions:
    """The ASGI endpoint of the paths that P and D serve together."""

    def __init__(self, http: httpx.AsyncClient, prefill: str, decode: str, control: str | None) -> None:
        self._http, self._prefill, self._decode, self._control = http, prefill.rstrip("/"), decode.rstrip("/"), control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or drop it when the client leaves: vLLM aborts what loses its connection."""
        request = Request(scope, receive)
        request.state.begun = False  # to answer
        with suppress(ClientDisconnect):
            content = await request.body()
            async with anyio.create_task_group() as work:
                work.start_soon(self._told, self._ask(request, content, send, work), request, send, work)
                await receive()  # a request that has been read has one thing left to tell: the client is gone
                work.cancel_scope.cancel()

    async def _told(self, asked: Awaitable[Any], request: Request, send: Send, work: TaskGroup) -> None:
        try:
            await asked
        except HTTPException as fault:
            if not request.state.begun:
                request.state.begun = True  # the other leg may have its answer in this very turn of the loop
                told = {"message": fault.detail, "type": "ProxyError", "param": None, "code": fault.status_code}
                by_p = fault.headers and Response(fault.detail, fault.status_code, fault.headers)
                await (by_p or JSONResponse({"error": told}, fault.status_code))(request.scope, request.receive, send)
                work.cancel_scope.cancel()

    async def _ask(self, request: Request, content: bytes, send: Send, work: TaskGroup) -> None:
        known = {"x-request-id": uuid.uuid4().hex, **request.headers}
        passed = known.keys() & {"x-request-id", "authorization"}
        plain = {name: "".join(filter(str.isprintable, known[name])) for name in passed}  # h11 takes no others
        headers = httpx.Headers(plain, encoding="latin-1")
        try:
            body: dict[str, Any] = json.loads(content) | {}
        except (ValueError, TypeError, RecursionError) as fault:
            raise HTTPException(400, f"the request body must be a JSON object: {fault}") from fault
        for place in (one for one in (body, body.get("vllm_xargs")) if isinstance(one, dict)):  # vLLM looks into both
            place.pop("kv_transfer_params", None)  # a client's own would make D connect to hosts of its choice
        if is_one_prompt(body):
            name = {"transfer_id": uuid.uuid4().hex} if self._control else {}
            for_p = {key: body[key] for key in body.keys() - NOT_FOR_P} | FOR_P
            for_p["kv_transfer_params"] = {"do_remote_decode": True} | name
            leg = self._prefill_leg(request, for_p, headers)
            if self._control:
                work.start_soon(self._told, leg, request, send, work)  # answered with null where D needed nothing
                body["kv_transfer_params"] = {"do_remote_prefill": True, "remote_engine_id": f"@{self._control}"} | name
            else:
                body["kv_transfer_params"] = await leg
        await self._decode_leg(request, body, headers, send)
        work.cancel_scope.cancel()

    async def _prefill_leg(self, request: Request, body: Any, headers: httpx.Headers) -> Any:
        async with self._sent(self._prefill + request.scope["path"], body, headers) as p:
            await p.aread()
        if p.status_code != 200:
            raise HTTPException(p.status_code, p.text, {"content-type": p.headers.get("content-type", "text/plain")})
        try:
            return told if (told := p.json()["kv_transfer_params"]) is None and self._control else told | {}
        except (ValueError, TypeError, KeyError) as fault:
            raise HTTPException(502, "no kv_transfer_params from P: is its kv_role kv_producer?") from fault

    async def _decode_leg(self, request: Request, body: Any, headers: httpx.Headers, send: Send) -> None:
        async with self._sent(self._decode + request.scope["path"], body, headers) as d:
            pieces = d.aiter_raw()
            piece = await anext(pieces, b"")  # vLLM says 200 before it computes: passed on when there is a byte
            kind = d.headers.get("content-type", "application/json").encode()
            if request.state.begun:
                return
            request.state.begun = True
            await send({"type": "http.response.start", "status": d.status_code, "headers": [(b"content-type", kind)]})
            try:
                while piece:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    piece = await anext(pieces, b"")
                await send({"type": "http.response.body"})
            except httpx.HTTPError as fault:  # without its end: the client sees that the answer is cut short
                logging.warning("%s broke off: %r", d.url, fault)

    @asynccontextmanager
    async def _sent(self, url: str, body: Any, headers: httpx.Headers) -> AsyncIterator[httpx.Response]:
        try:
            async with self._http.stream("POST", url, content=json.dumps(body), headers=headers) as answer:
                yield answer
        except httpx.HTTPError as fault:
            logging.warning("%s failed: %r", url, fault)
            told = f"a server failed: {type(fault).__name__}"  # without the text, which names the server's address
            raise HTTPException(504 if isinstance(fault, httpx.TimeoutException) else 502, told) from fault


async def _main() -> None:
    parser = argparse.ArgumentParser(description="One prefill and one decode server behind one OpenAI-compatible port.")
    for role in ("--prefill", "--decode"):
        parser.add_argument(role, required=True, metavar="URL")
    parser.add_argument("--control", metavar="HOST:PORT", help="P's control channel: both legs are sent at once")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    # A request under way takes up to three sockets.
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    # Any number of connections, and a new one for each leg: vLLM closes idle ones, and one may be used just then.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    timeout = httpx.Timeout(600, connect=10)
    plain = {"content-type": "application/json", "accept-encoding": "identity"}
    async with httpx.AsyncClient(limits=limits, timeout=timeout, headers=plain, trust_env=False) as http:
        endpoint = Completions(http, options.prefill, options.decode, options.control)
        routes = [Route(f"/v1/{name}", endpoint, methods=["POST"]) for name in ("completions", "chat/completions")]
        app = Starlette(routes=routes)  # by h11: httptools loses the body of a request that offers ``Upgrade: h2c``
        config = uvicorn.Config(app, options.host, options.port, http="h11", timeout_graceful_shutdown=2)
        await uvicorn.Server(config).serve()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        anyio.run(_main)
