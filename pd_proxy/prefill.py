"""The prefill leg: P computes the prompt and one token, and tells where the KV cache is."""

import json
import re
import time
from http import HTTPStatus
from typing import NoReturn

from pd_proxy import headers as passed
from pd_proxy.apis import Api, Body, encoded
from pd_proxy.control import NO_RANK, Engine
from pd_proxy.error_answers import LegFailed, LegRefused, NothingHandedOver, Retry, is_error, retry_of
from pd_proxy.http_client import Client
from pd_proxy.parameters import prefill_body
from pd_proxy.servers import Answer
from pd_proxy.upstream import Upstream

#: With what vLLM refuses a request whose header names a rank that the server has not (0.23 with 500, of messages). A
#: client's own words are nowhere the beginning of a message.
_RANKS = re.compile(rb'"message": ?"data_parallel_rank \d+ is out of range \[0, (\d{1,4})\)')


async def run_prefill(
    upstream: Upstream, client: Client, engine: Engine, body: Body, transfer_id: str | None = None, *, used: bool
) -> Body:
    """Send a request's prefill leg to one server, and return the answer, which has ``kv_transfer_params``.

    What they tell about the server's control channel is noted. A rank that the server has not was not the client's
    choice: the request is sent again without.

    Args:
        engine: one of the prefill leg.
        body: of the client.
        transfer_id: under which a decode server asks for the KV cache meanwhile.
        used: whether the client is to get the answer's token.

    Raises:
        LegFailed: the server could not be reached, fell silent, broke off or gave an answer that cannot be used.
        NothingHandedOver: that answer is one without ``kv_transfer_params``.
        LegRefused: it answered with an error.
    """
    record, server = client.record, engine.server
    record.prefill_url = server.url
    started = time.monotonic()
    record.prefill_s, record.prefill_at = None, started
    content = encoded(prefill_body(upstream.api, body, transfer_id, used=used))
    headers = upstream.headers(client.headers, record.identity, relayed=False)
    if engine.rank is not None:
        headers.append((passed.RANK, str(engine.rank)))
    with record.trace.leg("prefill") as leg:
        leg.goes_to(server.url)
        asked = upstream.prefill.ask(server, "POST", upstream.api.path, leg.applied_to(headers), content)
        async with await asked as answer:
            text = await answer.read()
        leg.answered(answer.status)
    record.prefill_s = time.monotonic() - started
    if answer.status != HTTPStatus.OK:
        told, control = None if engine.rank is None else _RANKS.search(text), upstream.control
        # In whatever words a rank that was none is refused, the client has not named it. A 5xx may be of the prompt.
        if told is not None or (engine.rank == NO_RANK and answer.status < HTTPStatus.INTERNAL_SERVER_ERROR):
            whole = control.choose(server, by_rank=False) if told is None else control.count(server, int(told[1]))
            return await run_prefill(upstream, client, whole, body, transfer_id, used=used)
        _refuse(answer, text, record.identity)
    try:
        checked = checked_answer(upstream.api, answer.url, text)
    except LegFailed as failure:
        is_whole = isinstance(failure, NothingHandedOver) and failure.finish_reason == "length"
        upstream.control.forget(server, is_sure=transfer_id is None or not is_whole)  # D may have told P so
        raise
    record.prompt_tokens = upstream.api.figures.prompt_tokens(checked)
    upstream.control.learn(engine, checked["kv_transfer_params"])
    return checked


def checked_answer(api: Api, url: str, text: bytes) -> Body:
    """Return a prefill server's answer, which has ``kv_transfer_params``.

    Raises:
        LegFailed: the answer is not JSON, or that of a request given up: vLLM, told to stop, answers new ones so.
        NothingHandedOver: it holds none.
    """
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LegFailed(HTTPStatus.BAD_GATEWAY, "prefill", url, "answered with invalid JSON", str(error)) from error
    transfer = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    if not isinstance(transfer, dict) or not transfer:
        reason = api.finish(answer) if isinstance(answer, dict) else None
        if reason == "abort":
            what = "gave the request up (finish reason 'abort')"
            way_out = "is it told to stop? Start another, or ask again when it is back"
            raise LegFailed(HTTPStatus.SERVICE_UNAVAILABLE, "prefill", url, what, way_out, Retry.ONCE)
        raise NothingHandedOver(url, reason, api.figures.of(answer if isinstance(answer, dict) else {}))
    return dict(answer)


def _refuse(answer: Answer, text: bytes, identity: str) -> NoReturn:
    if not is_error(text):
        shown = text[:500].decode("utf-8", "replace")
        known = answer.status >= 400 and answer.status in HTTPStatus.__members__.values()
        status = HTTPStatus(answer.status) if known else HTTPStatus.BAD_GATEWAY
        what = f"answered with status {answer.status}"
        raise LegFailed(status, "prefill", answer.url, what, shown, retry_of(answer.status))
    raise LegRefused(answer.status, passed.to_client(answer.raw_headers, identity), text)
