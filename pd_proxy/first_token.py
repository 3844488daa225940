"""P's own token as the beginning of the answer: the client has it when P has, and D goes on behind it.

P samples a token to end its leg, which is thrown away otherwise. D computes the last prompt token itself and samples
the same one, if sampling is greedy and nothing but the prompt shapes it. So P's token is sent to the client at once,
and the same text is taken off the beginning of what D answers. It is compared, because where two tokens are almost
equally likely, kernels that add up in another order may rank them differently on P and D. Where D begins differently or
fails, the answer moves: the next D goes on behind P's token, by its id.

P's token waits for the head of D's answer: vLLM sends its 200 before it computes anything, and a refusal instead of it,
of what P's leg does not have.

``may_begin`` knows the requests for which P's token is D's. All others are left alone. How a chat's first token is
shown depends on the server's reasoning and tool parsers, which treat whole answers, as P gives them, differently from
streams: so chats begin so only where the operator says that no server has one (``Settings.plain_chats``).
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from http import HTTPStatus

from pd_proxy.apis import Api, Body
from pd_proxy.error_answers import COMMENT, EVENT_END, LegFailed
from pd_proxy.headers import to_client
from pd_proxy.http_client import Client
from pd_proxy.moves import Written, event_of, is_greedy, may_move


def may_begin(api: Api, body: Body) -> bool:
    """Return whether P's token is the first of D's answer, by what the client asked for."""
    limits = [body.get(limit) for limit in ("max_tokens", "max_completion_tokens")]
    # With one token, D would have nothing to add.
    return is_greedy(body) and may_move(api, body) and all(limit is None or limit > 1 for limit in limits)


class FirstToken:
    """The first token of one answer, from P's answer to the client, and D's stream behind it."""

    def __init__(self, client: Client, begun: Written) -> None:
        """``begun``: the answer with this token and no other, for the decode server that goes on if the first fails."""
        self._client = client
        self.begun = begun
        self.is_followed = False  # the client may have something of D's
        self._answer: Body | None = None  # P's, while the client is to have it later
        self._is_taken = False
        self._text = ""
        self._sent = asyncio.Event()

    async def send(self, answer: Body) -> None:
        """Begin the client's answer with the text of P's token, as soon as D has taken the request, unless D has begun.

        A token may have no text yet: it is a part of a character. That is left to D. So is a prompt of which P has left
        the last token to D: its answer's token is none of the text.
        """
        self._answer = answer
        if self._is_taken:
            await self.release()

    async def release(self) -> None:
        """D has taken the request, or will not refuse it: begin the client's answer when P's is here."""
        self._is_taken = True
        answer, self._answer = self._answer, None
        if answer is None or self._client.started or answer["kv_transfer_params"].get("prompt_is_cut"):
            return
        self._text, events = self.begun.begun(answer)
        if not self._text:
            return
        self._client.record.first_token_at = time.monotonic()
        kind = (b"content-type", b"text/event-stream; charset=utf-8")  # as vLLM has it
        await self._client.start(HTTPStatus.OK, to_client([kind], self._client.record.identity))
        await self._client.send_piece(events)
        self._sent.set()

    async def is_sent(self) -> bool:
        """Return whether the answer has begun with P's token, which the client then has been sent."""
        return bool(self._text) and await self._sent.wait()

    async def continued(self, url: str, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield D's stream without the text that the client has.

        Raises:
            LegFailed: D begins with another text, or with an error.
        """
        missing, buffered = self._text, b""
        async for piece in pieces:
            buffered, passed = buffered + piece, b""
            while missing and EVENT_END in buffered:
                raw, _, buffered = buffered.partition(EVENT_END)
                is_comment = raw.startswith(COMMENT)
                missing, rest = (missing, raw + EVENT_END) if is_comment else self._without(url, missing, raw)
                passed += rest
            if not missing:
                passed, buffered = passed + buffered, b""
            if passed:
                self.is_followed = not missing
                yield passed
        if missing or buffered:
            raise self._differs(url, buffered)

    def _without(self, url: str, missing: str, raw: bytes) -> tuple[str, bytes]:
        """Return what is missing behind an event of D's, and what is left of the event."""
        try:
            event = json.loads(raw.removeprefix(b"data: "))
            if "error" in event:
                raise LegFailed(HTTPStatus.BAD_GATEWAY, "decode", url, "failed", f"{event['error']!r:.500}")
            choice = event["choices"][0]
            shown, name = (choice["delta"], "content") if "delta" in choice else (choice, "text")
            text, ends = shown[name], choice["finish_reason"]
            if ends in ("abort", "error"):
                raise LegFailed(HTTPStatus.BAD_GATEWAY, "decode", url, "gave the request up", f"finish reason {ends!r}")
        except (ValueError, KeyError, IndexError, TypeError):  # the end, or nothing that vLLM sends
            raise self._differs(url, raw) from None
        taken = min(len(missing), len(text))
        if missing[:taken] != text[:taken] or (ends and taken < len(missing)):
            raise self._differs(url, raw)
        shown[name] = text[taken:]
        return missing[taken:], event_of(event) if shown[name] or ends else b""

    def _differs(self, url: str, raw: bytes) -> LegFailed:
        shown = raw[:300].decode("utf-8", "replace")
        self._client.record.first_token_differs = True
        what = "does not begin with the prefill server's token"
        return LegFailed(HTTPStatus.BAD_GATEWAY, "decode", url, what, f"{self._text!r}: {shown}")
