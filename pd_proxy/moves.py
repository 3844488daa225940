"""An answer that moves: its decode server is to be restarted, or fails, and another one goes on with the text. No I/O.

The rest of an answer is a text completion whose prompt is the first server's prompt and the tokens so far, by their
ids. So D is asked for ids beside the text (``return_token_ids``); the client does not see them. The new request takes
both legs as any other, with what has been written as its prompt, or goes to another D alone that is told where it finds
that. Nothing is computed twice if P or D finds it at the D that wrote it, and nothing that the client has is written
again.

``may_move`` knows the requests whose rest is such a completion: nothing shapes a token by its place in the output. A
chat is one as long as each of its tokens comes as content. Where a parser on D has taken something out (reasoning,
say), the next D could not know where the parser stands, so that the answer ends where it is. A parser may also hold
back a part of a token, even if a request has no tools, and no event tells: so chats move only where the operator says
that no server has a parser (``Settings.plain_chats``). Text completions pass no parser: each token's text is whole.

Answers move behind an event of one token with a text. Then the client has all of this token, and the next server begins
with a whole character. Half a character has no text yet, and an answer waits for the other half: tokens that are given
up because of what they are would come less often than the model says. Only halves of a D that fails are given up. Of
several tokens, the last may be such a half.
"""

import json
from array import array
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from http import HTTPStatus
from typing import Any

from pd_proxy.apis import CHAT, COMPLETIONS, Api, Body
from pd_proxy.error_answers import COMMENT, EVENT_END, LegFailed
from pd_proxy.usage import Details, PromptDetails

#: Which change nothing by a token's place in the output, whatever their values. The first ones make the prompt, or
#: count from its end: the rest of an answer has its own.
_OF_THE_BEGINNING = {"prompt", "max_tokens", "seed", "add_special_tokens", "truncate_prompt_tokens", "truncation_side"}
_OF_EACH_TOKEN = {"model", "stream", "stream_options", "ignore_eos", "temperature", "top_p", "top_k", "min_p"}
_OF_REQUESTS = {"cache_salt", "user", "request_id", "session_id", "priority", "kv_transfer_params"}
_HARMLESS = _OF_THE_BEGINNING | _OF_EACH_TOKEN | _OF_REQUESTS
#: Which do, or could end the text, and their values that do neither.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "stop": ([], ""), "stop_token_ids": ([],),
    "include_stop_str_in_output": (False, True), "min_tokens": (0,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "repetition_penalty": (1,), "length_penalty": (0, 1), "logit_bias": ({},),
    "bad_words": ([],), "use_beam_search": (False,), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "return_token_ids": (False,), "return_tokens_as_token_ids": (False,),
}  # fmt: skip
_OF_TEMPLATES = {"messages", "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"}
_OF_CHATS = _OF_TEMPLATES | {"documents", "reasoning_effort", "max_completion_tokens", "metadata", "store"}
_NEUTRAL_IN_CHATS: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,), "top_logprobs": (0,), "tool_choice": ("none",), "parallel_tool_calls": (False, True),
    "include_reasoning": (True,), "response_format": ({"type": "text"},),
}  # fmt: skip
#: Members that are the same in all events of an answer.
_HEAD = ("id", "object", "created", "model")
#: What is raised where an answer is nothing that vLLM sends.
NOT_VLLMS = (LookupError, ValueError, TypeError, AttributeError, OverflowError)
#: vLLM's own, of a text completion that says nothing.
_FEW_TOKENS = 16


def may_move(api: Api, body: Body) -> bool:
    """Return whether another decode server can go on with an answer, by what the client asked for."""
    limits = body.get("max_tokens", None if api.is_chat else _FEW_TOKENS), body.get("max_completion_tokens")
    # vLLM takes numbers in other forms, too. To a text completion, null is all the room there is before vLLM 0.30, and
    # 16 tokens since.
    if any(type(limit) not in (int, type(None)) for limit in limits) or not (any(limits) or has_no_limit(api, body)):
        return False
    if body.get("seed") is not None and not is_greedy(body):
        return False
    if api is COMPLETIONS:
        return api.undivided(body) is None and _is_plain(body, _HARMLESS, _NEUTRAL)
    if api is not CHAT or not _is_plain(body, _HARMLESS | _OF_CHATS, _NEUTRAL | _NEUTRAL_IN_CHATS):
        return False
    messages = body.get("messages")
    return isinstance(messages, list) and all(map(_is_text, messages))


def has_no_limit(api: Api, body: Body) -> bool:
    """Return whether an answer may fill all the room that the model has, which its rest must then be told."""
    return api.is_chat and body.get("max_tokens") is None and body.get("max_completion_tokens") is None


def is_greedy(body: Body) -> bool:
    """Return whether the client says that nothing is drawn: each token is the most likely one."""
    temperature = body.get("temperature")
    return temperature == 0 and not isinstance(temperature, bool)


def _is_plain(body: Body, harmless: Collection[str], neutral: Mapping[str, tuple[Any, ...]]) -> bool:
    """Return whether a request is for a stream, has parameters of these names and values alone, and counts at the end.

    Args:
        body: of the client.
        harmless: names whose values do not matter.
        neutral: the values that do not matter, by name.
    """
    options = body.get("stream_options") or {}
    if body.get("stream") is not True or not isinstance(options, dict) or options.get("continuous_usage_stats"):
        return False
    return all(name in harmless or value is None or value in neutral.get(name, ()) for name, value in body.items())


class Written:
    """What decode servers have written of one answer, and what another one needs to go on."""

    def __init__(self, api: Api, body: Body, room: int | None = None) -> None:
        """``room``: tokens of a prompt and its answer together, for an answer without a limit of its own."""
        self.is_due = False  # the server is leaving, and its answer was left at a place where another one can go on
        self.found_at = ""  # where that one finds what was written; empty if that is not known
        self._is_chat, self._body, self._room = api.is_chat, body, room or 0
        self._prompt = array("I")  # token ids, as the first server told them
        self._tokens = array("I")  # and those that were written
        self._before = 0  # of them, by other servers than the last
        self._whole: int | None = None  # of them, those that the client has, if it has nothing of the next one
        self._is_open = True  # nothing has come that keeps another server from going on
        self._head: Body = {}
        self._details: Details | None = None

    def begun(self, answer: Body) -> tuple[str, bytes]:
        """Note a prefill server's one token; return its text, and the events that a stream begins with.

        Both are empty where another server could not go on behind it: it has no text, is half a character, or there is
        no room for more.
        """
        try:
            (choice,) = answer["choices"]
            (token,) = choice["token_ids"]
            tokens = array("I", [token])
            prompt = array("I", choice.get("prompt_token_ids") or answer["prompt_token_ids"])
            message = choice["message"] if self._is_chat else {"content": choice["text"]}
            text = message["content"]
            if not text or text.endswith("\ufffd") or 0 < self._room <= len(prompt) + 1:
                return "", b""
        except NOT_VLLMS:  # who asks for ids
            return "", b""
        self._prompt, self._tokens, self._whole = prompt, tokens, 1
        self._head = {name: answer.get(name) for name in _HEAD}
        shown: list[Body] = [{"text": text}]
        if self._is_chat:
            self._head["object"] = "chat.completion.chunk"
            shown = [{"delta": {"role": message.get("role"), "content": ""}}, {"delta": {"content": text}}]
        nulls = dict.fromkeys(("logprobs", "finish_reason", "stop_reason")[: 2 if self._is_chat else 3])
        return text, b"".join(event_of(self._head | {"choices": [{"index": 0} | one | nulls]}) for one in shown)

    @property
    def can_go_on(self) -> bool:
        """Whether another server can write the rest."""
        return self._is_open and self._whole is not None and len(self._prompt) > 0

    def details(self, of_server: Details | None) -> Details | None:
        """Return the figures of the client's prompt: those of the first prefill server, whoever answers now."""
        if not self._before:
            self._details = of_server
        return self._details or (_unknown if self._before else None)

    def rest(self) -> Body:
        """Begin with the rest of the answer: return the client's body for it, a text completion's. ``can_go_on``."""
        assert self._whole is not None
        del self._tokens[self._whole :]
        self._before, self.is_due = self._whole, False
        most = self._room - len(self._prompt) if self._is_chat else _FEW_TOKENS
        limit = self._body.get("max_completion_tokens") or self._body.get("max_tokens") or most
        kept = (_HARMLESS | _NEUTRAL.keys()) - _OF_THE_BEGINNING
        return {name: value for name, value in self._body.items() if name in kept} | {
            "prompt": [*self._prompt, *self._tokens],
            "max_tokens": limit - self._before,
        }

    async def followed(
        self, url: str, pieces: AsyncIterator[bytes], must_leave: Callable[[], bool]
    ) -> AsyncIterator[bytes]:
        """Yield a decode server's stream as the client gets it, to its end or to where another server can go on.

        Args:
            url: of the server.
            pieces: of its answer.
            must_leave: whether another server is to go on.

        Raises:
            LegFailed: a server that was to go on tells of an error.
        """
        buffered = b""
        async for piece in pieces:
            *events, buffered = (buffered + piece).split(EVENT_END)
            passed = b""
            try:
                for raw in events:
                    passed += self._passed(url, raw)
            finally:  # also what comes before an error: it is noted, so that the rest begins behind it
                if passed:
                    yield passed
            if self.can_go_on and self._whole == len(self._tokens) and must_leave():
                self.is_due = True
                return
        if buffered:
            yield buffered

    def _passed(self, url: str, raw: bytes) -> bytes:
        """Note what is in an event; return what the client gets of it."""
        if raw.startswith(COMMENT):
            return raw + EVENT_END
        try:
            event = json.loads(raw.removeprefix(b"data: "))
            if self._before and "error" in event:
                raise LegFailed(HTTPStatus.BAD_GATEWAY, "decode", url, "failed", f"{event['error']!r:.500}")
            is_shown = not event["choices"] or self._note(event, event["choices"][0])
            if self._before:
                event |= self._head
                self._count(event)
            self._head = self._head or {name: event.get(name) for name in _HEAD}
            return event_of(event) if is_shown else b""
        except NOT_VLLMS:  # or the end, or an error
            self._is_open = False
            return raw + EVENT_END

    def _note(self, event: Body, choice: Body) -> bool:
        """Note a choice's tokens and take them out; return whether vLLM would have sent it without them."""
        prompt = _taken(event, "prompt_token_ids") or _taken(choice, "prompt_token_ids")
        if prompt and not self._before:
            self._prompt = array("I", prompt)
        tokens = _taken(choice, "token_ids") or []
        self._tokens.extend(tokens)
        delta = choice.get("delta")
        text = choice.get("text") if delta is None else delta.get("content")
        if not isinstance(text, str) or (delta is not None and not delta.keys() <= {"role", "content"}):
            self._is_open = False
        elif text:
            self._whole = len(self._tokens) if len(tokens) == 1 and not text.endswith("\ufffd") else None
        if choice.get("finish_reason") is not None:
            self._is_open = False
        elif delta == {}:
            return False
        if self._is_chat and delta is None:
            choice["delta"] = {"content": choice.pop("text")}
        return True

    def _count(self, event: Body) -> None:
        """Let the figures at the end be those of the whole answer."""
        if usage := event.get("usage"):
            prompt, written = len(self._prompt), self._before + usage["completion_tokens"]
            usage |= {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def _taken(members: Body, name: str) -> Any:
    """Return a member, and leave what vLLM writes where nobody asked for it."""
    value = members.get(name)
    if value is not None:
        members[name] = None
    return value


def _is_text(message: object) -> bool:
    """Return whether a message has nothing but text: what stands for an image is no text when it comes back."""
    if not isinstance(message, dict):
        return False
    content = message.get("content")
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)


def event_of(content: object) -> bytes:
    """Return an event of a stream, as vLLM writes it."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _unknown() -> PromptDetails:
    return PromptDetails()
