"""vLLM's APIs that generate, as a table of where each has what the proxy reads and changes. No HTTP.

| path | the prompt is computed for one token by | differs in |
|---|---|---|
| /v1/completions | max_tokens 1 | P's token may be the first of the answer |
| /v1/chat/completions | max_tokens 1, max_completion_tokens 1 | response_format reaches the prompt |
| /v1/responses | max_output_tokens 1, store and background false | the stream begins before anything is computed |
| /v1/messages | max_tokens 1 | no parameter keeps the one token from ending the text; errors in Anthropic's shape |
| /inference/v1/generate | sampling_params.max_tokens 1 | sampling parameters have an object of their own |
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec

from pd_proxy.error_answers import ErrorShape
from pd_proxy.usage import ANTHROPIC, CHAT_DETAILS, RESPONSES_DETAILS, Figures

Body = dict[str, Any]


def parsed(content: bytes) -> Any:
    """Return the JSON value that bytes are.

    Raises:
        ValueError, RecursionError: they are none, or have a number that JSON has not.
    """
    try:
        return msgspec.json.decode(content)
    except (msgspec.MsgspecError, ValueError):  # it takes no lone surrogates and no UTF-16; its errors say less
        return json.loads(content, parse_constant=_refused, parse_float=_finite)


def encoded(body: Body) -> bytes:
    """Return a body as JSON."""
    try:
        return msgspec.json.encode(body)
    except (UnicodeEncodeError, OverflowError):  # a lone surrogate, an integer of more than 64 bits
        return json.dumps(body).encode()


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _refused(text)


def _refused(number: str) -> NoReturn:
    raise ValueError(f"{number[:40]} is not a JSON number")  # it may be megabytes, and is logged


#: Tools that vLLM itself may run, and ask the model again with their results.
_RUN_BY_SERVERS = frozenset({"web_search_preview", "code_interpreter", "container", "mcp"})
#: A first token that ends the text would end a prefill leg with finish reason ``stop``.
_TO_ITS_END: Body = {"ignore_eos": True}
_ONE_SAMPLE: Body = {"max_tokens": 1, "n": 1, "temperature": 0.0} | _TO_ITS_END

_EARLIER, _BACKGROUND = "an earlier response", "in the background"
SEVERAL = "several prompts"
UNSHARED = "several samples, no prefix cache"
CUT = "a prompt cut to what the output leaves"
#: Why only the decode server that keeps a response can serve a request.
KEPT = frozenset({_EARLIER, _BACKGROUND})


def _first_choice(answer: Body) -> object:
    try:
        return answer["choices"][0]["finish_reason"]
    except (KeyError, IndexError, TypeError):
        return None


def _response_status(answer: Body) -> object:
    """An answer that was given up may call itself completed, but has no token, which P's leg always has."""
    status, usage = answer.get("status"), answer.get("usage")
    if isinstance(usage, dict) and usage.get("output_tokens") == 0:
        return "abort"
    return {"completed": "stop", "incomplete": "length", "cancelled": "abort"}.get(str(status), status)


def _message_stop(answer: Body) -> object:
    """A message that was given up has no reason."""
    reason = answer.get("stop_reason")
    return {"end_turn": "stop", "max_tokens": "length", "None": "abort"}.get(str(reason), reason)


@dataclass(frozen=True, slots=True, eq=False)
class Api:
    """One API of vLLM: where its requests and answers have what matters for two legs. Each is equal to itself alone."""

    path: str
    one_token: Body  # has a request compute its prompt and one token; empty if the path does not generate
    undivided: Callable[[Body], str | None] = lambda _: None  # why D serves a request alone, by this API's own rules
    sampling: str = ""  # the member that has the sampling parameters; empty if the body itself has them
    is_chat: bool = False
    takes_rank: bool = True  # a header may name the data-parallel rank, in all releases
    finish: Callable[[Body], object] = _first_choice  # vLLM's reason why an answer ended; None if it tells none
    figures: Figures = CHAT_DETAILS  # of the prompt, in an answer
    preludes: tuple[bytes, ...] = ()  # events of a stream that tell nothing of what is computed
    errors: ErrorShape = ErrorShape.OPENAI
    dropped: Callable[[Body], frozenset[str]] = lambda _: frozenset()  # from the prefill leg, beside all APIs' own

    def parameters(self, body: Body) -> Body:
        """Return a request's sampling parameters."""
        found = body.get(self.sampling, {}) if self.sampling else body
        return found if isinstance(found, dict) else {}


def _texts(body: Body) -> str | None:
    if body.get("prompt_embeds"):
        return "prompt embeddings"
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) != 1 and not all(isinstance(item, int) for item in prompt):
        return SEVERAL
    return None


def _responses(body: Body) -> str | None:
    """D alone may know an earlier response, keeps what runs in the background, and calls tools again and again."""
    if body.get("previous_response_id"):
        return _EARLIER
    if body.get("background"):
        return _BACKGROUND
    tools = body.get("tools")
    kinds = [tool.get("type") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    if any(isinstance(kind, str) and kind in _RUN_BY_SERVERS for kind in kinds):
        return "tools that a server runs"
    if body.get("truncation", "disabled") != "disabled":  # vLLM cuts at null, too
        return CUT
    return None


def _messages(body: Body) -> str | None:
    """Of a call of a forced tool, one token is no JSON: some of vLLM's parsers fail on it."""
    choice = body.get("tool_choice")
    return "a forced tool" if isinstance(choice, dict) and choice.get("type") == "tool" else None


def _of_messages(body: Body) -> frozenset[str]:
    """Thinking that is enabled sets a budget of the output only, for which a P may lack the parser."""
    thinking = body.get("thinking")
    limits = isinstance(thinking, dict) and thinking.get("type") == "enabled"
    return frozenset({"stop_sequences", "thinking"} if limits else {"stop_sequences"})


COMPLETIONS = Api("/v1/completions", _ONE_SAMPLE, undivided=_texts, dropped=lambda _: frozenset({"response_format"}))
CHAT = Api("/v1/chat/completions", _ONE_SAMPLE | {"max_completion_tokens": 1}, is_chat=True)
RESPONSES = Api(
    "/v1/responses",
    {"max_output_tokens": 1, "temperature": 0.0, "store": False, "background": False} | _TO_ITS_END,
    undivided=_responses,
    takes_rank=False,  # before vLLM 0.33
    finish=_response_status,
    figures=RESPONSES_DETAILS,
    preludes=(b"response.created", b"response.in_progress"),
    dropped=lambda _: frozenset({"include"}),
)
MESSAGES = Api(
    "/v1/messages",
    {"max_tokens": 1, "temperature": 0.0},
    finish=_message_stop,
    figures=ANTHROPIC,
    errors=ErrorShape.ANTHROPIC,
    undivided=_messages,
    dropped=_of_messages,
)
GENERATE = Api("/inference/v1/generate", _ONE_SAMPLE, sampling="sampling_params")

ALL = (COMPLETIONS, CHAT, RESPONSES, MESSAGES, GENERATE)
