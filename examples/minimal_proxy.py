"""A router for prefill/decode disaggregation in one file, to read and to copy.

    python examples/minimal_proxy.py --prefill http://P:8100 --decode http://D:8200

P computes the prompt and one token, and answers where its KV cache lies (``kv_transfer_params``). D gets the client's
request with that, fetches it, and answers the client. In turn: pd-proxy sends D its leg together with P's.
"""

import argparse
import json
import logging
import uuid
from contextlib import suppress
from typing import Any

import anyio
import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

#: Exactly one token (of a text that ends before it, P hands nothing over), and the KV cache kept for another engine.
FOR_P: dict[str, Any] = {"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "ignore_eos": True, "stream": False}
FOR_P |= {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
#: Could end the text all the same, or is refused beside one token. All else may be a part of the prompt, and stays.
NOT_FOR_P = {"stream_options", "min_tokens", "stop", "stop_token_ids", "repetition_detection", "best_of"}


def is_one_prompt(body: dict[str, Any]) -> bool:
    """Return whether one prompt is continued, and D need not compute it; D serves anything else alone."""
    prompt, limits = body.get("prompt"), (body.get("max_tokens"), body.get("max_completion_tokens"))
    prompts = isinstance(prompt, list) and len(prompt) != 1 and not all(isinstance(token, int) for token in prompt)
    computed = body.get("prompt_embeds") or body.get("echo") or body.get("prompt_logprobs") is not None
    return not (prompts or body.get("use_beam_search") or computed or 0 in limits)


def _fail(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "ProxyError", "param": None, "code": status}}, status)


class Completions:
    """The ASGI endpoint of the paths that P and D serve together."""

    def __init__(self, http: httpx.AsyncClient, prefill: str, decode: str) -> None:
        self._http, self._prefill, self._decode = http, prefill.rstrip("/"), decode.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or drop it when the client leaves: vLLM aborts what loses its connection."""
        request = Request(scope, receive)
        with suppress(ClientDisconnect):
            content = await request.body()
            async with anyio.create_task_group() as work:
                work.start_soon(self._answer, request, content, send, work.cancel_scope)
                await receive()  # a request that has been read has one thing left to tell: the client is gone
                work.cancel_scope.cancel()

    async def _answer(self, request: Request, content: bytes, send: Send, work: anyio.CancelScope) -> None:
        try:
            answer = await self._ask(request, content, send)
        except httpx.TransportError as fault:
            answer = _fail(504 if isinstance(fault, httpx.TimeoutException) else 502, f"a server failed: {fault!r}")
        if answer is not None:
            await answer(request.scope, request.receive, send)
        work.cancel()

    async def _ask(self, request: Request, content: bytes, send: Send) -> Response | None:
        told, path = {"x-request-id": uuid.uuid4().hex, **request.headers}, request.url.path
        headers = {name: told[name] for name in told.keys() & {"x-request-id", "authorization"}}
        try:
            body: dict[str, Any] = json.loads(content) | {}
        except (ValueError, TypeError, RecursionError) as fault:
            return _fail(400, f"the request body must be a JSON object: {fault}")
        for place in (one for one in (body, body.get("vllm_xargs")) if isinstance(one, dict)):  # vLLM looks into both
            place.pop("kv_transfer_params", None)  # a client's own would make D connect to hosts of its choice
        if is_one_prompt(body):
            for_p = {name: body[name] for name in body.keys() - NOT_FOR_P} | FOR_P
            p = await self._http.post(self._prefill + path, content=json.dumps(for_p), headers=headers)
            if p.status_code != 200:
                return Response(p.content, p.status_code, media_type=p.headers.get("content-type"))
            try:
                body["kv_transfer_params"] = p.json()["kv_transfer_params"] | {}
            except (ValueError, TypeError, KeyError):
                return _fail(502, "no kv_transfer_params from P: is its kv_role kv_producer?")
        async with self._http.stream("POST", self._decode + path, content=json.dumps(body), headers=headers) as d:
            pieces = d.aiter_raw()
            piece = await anext(pieces, b"")  # vLLM says 200 before it computes: passed on when there is a byte
            kind = d.headers.get("content-type", "application/json").encode()
            await send({"type": "http.response.start", "status": d.status_code, "headers": [(b"content-type", kind)]})
            try:
                while piece:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    piece = await anext(pieces, b"")
                await send({"type": "http.response.body"})
            except httpx.TransportError as fault:  # without its end: the client sees that the answer is cut short
                logging.warning("%s broke off: %r", d.url, fault)
        return None


async def _main() -> None:
    parser = argparse.ArgumentParser(description="One prefill and one decode server behind one OpenAI-compatible port.")
    parser.add_argument("--prefill", required=True, metavar="URL")
    parser.add_argument("--decode", required=True, metavar="URL")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    timeout, limits = httpx.Timeout(600, connect=5), httpx.Limits(keepalive_expiry=2)  # vLLM closes idle ones after 5 s
    plain = {"content-type": "application/json", "accept-encoding": "identity"}
    async with httpx.AsyncClient(timeout=timeout, limits=limits, headers=plain, trust_env=False) as http:
        endpoint = Completions(http, options.prefill, options.decode)
        routes = [Route(f"/v1/{name}", endpoint, methods=["POST"]) for name in ("completions", "chat/completions")]
        config = uvicorn.Config(Starlette(routes=routes), options.host, options.port, timeout_graceful_shutdown=2)
        await uvicorn.Server(config).serve()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        anyio.run(_main)
