"""Requests that are not divided: one decode server answers them, and the proxy passes both ways on."""

import re
from http import HTTPStatus
from urllib.parse import quote

from starlette.requests import Request

from pd_proxy.apis import SEVERAL, Api, encoded
from pd_proxy.decode import relay
from pd_proxy.error_answers import ErrorShape, RequestError
from pd_proxy.exchange import Exchange
from pd_proxy.http_client import Client, json_object
from pd_proxy.parameters import without_transfer

_BATCH = "/v1/chat/completions/batch"
#: vLLM's paths that go to one decode server. Its administrative ones do not go through the proxy.
RELAYED = (
    "/v1/models", "/version", "/ping", "/tokenize", "/detokenize", "/v1/messages/count_tokens",
    "/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score",
    "/rerank", "/v1/rerank", "/v2/rerank", "/generative_scoring", "/v1/systemone", "/v1/decisions",
    "/v1/completions/render", "/v1/completions/derender", _BATCH,
    "/v1/chat/completions/render", "/v1/chat/completions/derender", "/v1/messages/render", "/v1/responses/render",
    "/v1/audio/transcriptions", "/v1/audio/translations",
)  # fmt: skip
#: Of responses that a decode server keeps.
STORED = {"/v1/responses/{response_id}": "GET", "/v1/responses/{response_id}/cancel": "POST"}
#: Bodies that are no JSON: for transcriptions, say.
_FORMS = ("multipart/", "application/x-www-form-urlencoded")
_PLAIN_CHARSET = re.compile(r'; *charset="?(utf-8|us-ascii)"?(?=;|$)')


def relayed_api(path: str) -> Api:
    """Return what the proxy needs to know of a path of which it changes nothing."""
    return Api(path, {}, errors=ErrorShape.ANTHROPIC if path.startswith("/v1/messages") else ErrorShape.OPENAI)


class Relay(Exchange):
    """The endpoint of a path that one decode server answers as it does without a proxy."""

    async def _serve(self, request: Request, client: Client, content: bytes) -> None:
        known, decode = self._upstream.api.path, self._upstream.decode
        if known in STORED and len(decode.members) > 1:
            raise RequestError(
                f"the response is kept by one of {len(decode.members)} decode servers, and this proxy does not "
                "know by which; ask the decode server itself"
            )
        record = client.record
        record.undivided = SEVERAL if known == _BATCH else ""
        if not {".", ".."}.isdisjoint(request.path_params.values()):
            await client.fail(HTTPStatus.NOT_FOUND, "there is no such path")
            return
        path = known.format(**{name: quote(value, safe="") for name, value in request.path_params.items()})
        query = request.scope["query_string"].decode("latin-1")
        headers = self._upstream.headers(client.headers, record.identity, relayed=True)
        kind = client.headers.get("content-type", "")
        headers = [(name, kind if name == "content-type" else value) for name, value in headers]
        sent = _without_transfer(content, kind) if content else None
        with record.trace.leg("decode") as leg:
            target = f"{path}?{query}" if query else path
            async with await decode.request(request.method, target, leg.applied_to(headers), sent) as answer:
                del content, sent  # megabytes, perhaps, and an answer takes minutes
                record.decode_url = answer.url
                leg.goes_to(answer.url)
                leg.answered(answer.status)
                await relay(client, answer, answer)
        await client.end()


def _without_transfer(content: bytes, kind: str) -> bytes:
    """Return a body without ``kv_transfer_params``; as it came if it has none.

    Raises:
        RequestError: the body is no JSON, or a form that has vLLM's extra arguments, which may have them, or could hide
            these by its charset.
    """
    if kind.lower().startswith(_FORMS):
        if b"vllm_xargs" in content:
            raise RequestError("vllm_xargs are not passed on in forms: they may have kv_transfer_params")
        if "charset" in _PLAIN_CHARSET.sub("", kind.lower()):
            raise RequestError(f"a form must be in utf-8, not as in {kind[:100]!r}: other charsets may hide vllm_xargs")
        return content
    body = json_object(content)
    return content if (kept := without_transfer(None, body)) == body else encoded(kept)
