"""The decode leg: D's answer goes to the client as it comes."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from http import HTTPStatus

from pd_proxy import headers as passed
from pd_proxy.apis import Api, Body, encoded
from pd_proxy.error_answers import COMMENT, FAILED, FULL, LegFailed
from pd_proxy.first_token import FirstToken
from pd_proxy.http_client import Client
from pd_proxy.moves import Written
from pd_proxy.servers import Answer, Server
from pd_proxy.upstream import Upstream
from pd_proxy.usage import Details, corrected, corrected_whole

#: Beginnings of events, and what tells those among them that vLLM sends with an engine's first news, also if these are
#: a failure: a message's start, and a chat's roles.
_NEWS = (b"event: message_start\n", b'data: {"id"')
_FIRST = re.compile(rb'event: message_start\n|"delta":\s*\{"role":\s*"\w*",\s*"content":\s*""\}')


async def at_once(_: int) -> None:
    """Let the client have an answer, whatever its status."""


async def run_decode(
    upstream: Upstream,
    client: Client,
    body: Body,
    *,
    may_answer: Callable[[int], Awaitable[None]] = at_once,
    first_token: FirstToken | None = None,
    details: Details | None = None,
    written: Written | None = None,
    failed: str = "",
) -> None:
    """Send a request to a decode server, and its answer, whatever it is, to the client.

    Args:
        body: of the decode leg.
        may_answer: is given the answer's status, and awaited, before the client gets anything of it.
        first_token: with which the client's answer may have begun.
        details: of the prompt, from the prefill leg; None if the answer's own are right.
        written: of an answer that may move; afterwards, it says whether the answer is left to another decode server.
        failed: the URL of the server that has just failed the request: it is asked last, and the answer not left to it.

    Raises:
        LegFailed: no server could be reached, or the one that was reached fell silent, broke off, or gave an answer
            that does not continue what the client has.
        ClientDisconnect: the client left.
    """
    record = client.record
    started = time.monotonic()
    record.first_byte_s, record.decode_at = None, started
    if written is not None:
        body, details = body | {"return_token_ids": True}, written.details(details)
    headers = upstream.headers(client.headers, record.identity, relayed=first_token is None and written is None)

    def note(server: Server) -> None:
        record.decode_url = server.url
        leg.goes_to(server.url)

    with record.trace.leg("decode") as leg:
        async with await upstream.decode.request(
            "POST", upstream.api.path, leg.applied_to(headers), encoded(body), chosen=note, failed=failed
        ) as answer:
            if first_token is not None and answer.status // 100 != 4 and answer.status != FULL:
                await first_token.release()
            # vLLM sends status 200, and the beginning of some streams, before it has computed anything. Held back until
            # there is more, so that a D that dies before is an error for the client and not an empty success.
            try:
                prelude, first = await begun(answer, upstream.api.preludes)
            except LegFailed as failure:
                if upstream.api.preludes:  # vLLM has no event there that tells of a failure, and breaks off
                    await may_answer(failure.status)
                raise
            record.first_byte_s = time.monotonic() - started
            leg.note("first byte")
            status = _status(answer, first)
            leg.answered(status)
            await may_answer(status)
            # Who cancels this leg in favour of another answer looks whether the client has got a part of this one.
            await asyncio.sleep(0)
            if status != answer.status:
                record.problem = f"decode server {answer.url} began its stream with an error of status {status}"
                record.broken_off = status >= HTTPStatus.INTERNAL_SERVER_ERROR
            answer.put_back(prelude + first)
            whole: AsyncIterator[bytes] = answer
            if written is not None:
                whole = written.followed(answer.url, answer, lambda: upstream.decode.can_spare(answer.server, failed))
            await _pass_on(client, answer, whole, upstream.api, first_token, details)
    if written is None or not written.is_due:
        await client.end()
    else:
        written.found_at = answer.server.prefixes_at


async def _pass_on(
    client: Client,
    answer: Answer,
    whole: AsyncIterator[bytes],
    api: Api,
    first_token: FirstToken | None,
    details: Details | None,
) -> None:
    """Send the client what D answers."""
    has_token = first_token is not None and await first_token.is_sent()
    if client.started:
        if answer.status != HTTPStatus.OK:
            what = f"answered with status {answer.status}"
            shown = await anext(whole, b"")
            raise LegFailed(HTTPStatus.BAD_GATEWAY, "decode", answer.url, what, repr(shown[:500]))
        rest = first_token.continued(answer.url, whole) if first_token is not None and has_token else whole
        async for piece in rest if details is None else corrected(rest, api.figures, details):
            await client.send_piece(piece)
    elif details is None or answer.status != HTTPStatus.OK or answer.is_encoded:  # no figures that can be read
        await relay(client, answer, whole)
    elif not answer.has_length:
        await relay(client, answer, corrected(whole, api.figures, details))
    else:
        content = await corrected_whole(b"".join([piece async for piece in whole]), api.figures, details)
        headers = passed.to_client(answer.raw_headers, client.record.identity)
        await client.start(answer.status, passed.with_length(headers, len(content)))
        await client.send_piece(content)


async def relay(client: Client, answer: Answer, pieces: AsyncIterator[bytes]) -> None:
    """Send the client an answer as it comes."""
    await client.start(answer.status, passed.to_client(answer.raw_headers, client.record.identity))
    async for piece in pieces:
        await client.send_piece(piece)


async def begun(pieces: AsyncIterator[bytes], preludes: tuple[bytes, ...]) -> tuple[bytes, bytes]:
    """Return the beginning of an answer in two parts: what is there however it goes on, and what is there behind that.

    ``preludes``: such events of the API, beside comments and those with which a chat and a message begin.
    """
    lines = (COMMENT, *_NEWS, *(b"event: " + name + b"\n" for name in preludes))
    data, start, searched = bytearray(await anext(pieces, b"")), 0, 0
    while any(line.startswith(data[start : start + len(line)]) for line in lines):
        if (end := data.find(b"\n\n", searched)) >= 0:
            if data.startswith(_NEWS, start):
                if not _FIRST.search(data, start, min(end, start + 1000)):  # behind that, there may be megabytes
                    break
                lines = _NEWS  # a comment behind it says that D computes, and that a parser hides the text
            start = searched = end + 2
        elif more := await anext(pieces, b""):
            searched = max(start, len(data) - 1)  # a request of megabytes is echoed there
            data += more
        else:
            break
    return bytes(data[:start]), bytes(data[start:])


def _status(answer: Answer, first: bytes) -> int:
    """Return an answer's status; that of an error with which a stream begins, because vLLM has said 200 by then."""
    if answer.status != HTTPStatus.OK or not first.startswith(FAILED):
        return answer.status
    try:
        error = json.loads(first.partition(b"data: ")[2].partition(b"\n\n")[0])["error"]
        return FULL.value if error.get("type") == "overloaded_error" else int(error["code"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return HTTPStatus.INTERNAL_SERVER_ERROR
