"""Answers that another decode server goes on with: which ones, at which place, and what is asked for the rest."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pd_proxy.apis import CHAT, COMPLETIONS, MESSAGES, Api
from pd_proxy.moves import Written, may_move
from tests.support.examples.moving import BODIES, DONE, PROMPT_IDS, TEXT, role, tokens


def said(value: object) -> str:
    """A name of an argument, the same in every process."""
    return value.path if isinstance(value, Api) else str(value)


KINDS = pytest.mark.parametrize("api", [COMPLETIONS, CHAT], ids=lambda api: str(api.path))


@KINDS
@pytest.mark.parametrize("size", [1, 2, 7, 50, 10_000])
def test_ids_are_taken_out_and_all_else_is_as_d_sent_it_however_it_is_cut(api: Api, size: int) -> None:
    chat = api.is_chat
    begins = role() + tokens(0, 1, chat=True) if chat else tokens(0, 1, begins=True)
    stream = begins + b"".join(tokens(at, at + 1, chat=chat) for at in range(1, 6)) + DONE
    shown = stream.replace(b'"prompt_token_ids":[7,8,9]', b'"prompt_token_ids":null')
    for token, _ in TEXT:
        shown = shown.replace(b'"token_ids":[%d]' % token, b'"token_ids":null')
    assert followed(Written(api, BODIES[api.path]), stream, size) == shown


def followed(written: Written, stream: bytes, size: int = 50, *, leaves: bool = False) -> bytes:
    """What the client gets of a stream that comes in pieces of this size."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(stream), size):
            yield stream[start : start + size]

    async def scenario() -> bytes:
        return b"".join([piece async for piece in written.followed("http://d", pieces(), lambda: leaves)])

    return asyncio.run(scenario())


def test_comments_pass_and_an_answer_moves_behind_them() -> None:
    """vLLM sends some to keep a silent connection open, if its operator says so."""
    comment = b": keep-alive\n\n"
    written = Written(COMPLETIONS, {})
    begun = followed(written, comment + tokens(0, 1, begins=True) + comment + tokens(1, 2), leaves=True)
    assert begun.count(comment) == 2
    assert written.is_due


def test_an_event_that_only_tells_ids_is_no_event_of_the_client() -> None:
    """vLLM sends what a parser keeps back only to those who ask for ids."""
    kept_back = tokens(1, 2, chat=True).replace(b'{"content":" b"}', b"{}")
    assert followed(Written(CHAT, {}), tokens(0, 1, chat=True) + kept_back).count(b"data: ") == 1


def test_behind_several_tokens_an_answer_stays_because_the_last_may_be_half() -> None:
    written = Written(COMPLETIONS, {})
    followed(written, tokens(0, 1, begins=True))
    followed(written, tokens(1, 3), 10_000, leaves=True)
    assert not written.is_due
    followed(written, tokens(3, 4), 10_000, leaves=True)
    assert written.is_due
    assert written.rest()["prompt"] == [*PROMPT_IDS, 10, 11, 12, 13]


@pytest.mark.parametrize(("room", "text"), [(4, ""), (5, "a")])
def test_nobody_goes_on_behind_a_token_that_fills_the_room(room: int, text: str) -> None:
    answer = {"choices": [{"message": {"content": "a"}, "token_ids": [5]}], "prompt_token_ids": PROMPT_IDS}
    assert Written(CHAT, {}, room).begun(answer)[0] == text


@pytest.mark.parametrize("token", [-1, 2**32, "1"])
def test_nobody_goes_on_behind_ids_that_no_vocabulary_has(token: object) -> None:
    choice = {"text": "a", "token_ids": [token], "prompt_token_ids": [1]}
    assert Written(COMPLETIONS, {}).begun({"choices": [choice]}) == ("", b"")


def test_an_event_that_cannot_be_written_anew_passes_as_it_came() -> None:
    event = b'data: {"choices":[{"index":0,"text":"\\ud83d","token_ids":[5],"finish_reason":null}]}\n\n'
    written = Written(COMPLETIONS, {})
    assert followed(written, event) == event
    assert not written.can_go_on


def test_half_a_character_stays_until_the_other_half_is_there() -> None:
    written = Written(COMPLETIONS, {})
    followed(written, tokens(0, 1, begins=True) + tokens(1, 2) + tokens(2, 3), 10_000, leaves=True)
    assert not written.is_due
    followed(written, tokens(3, 4), leaves=True)
    assert written.is_due
    assert written.rest()["prompt"] == [*PROMPT_IDS, 10, 11, 12, 13]


def test_what_cannot_be_read_as_text_is_no_place_to_go_on() -> None:
    written = Written(COMPLETIONS, {})
    followed(written, tokens(0, 1, begins=True).replace(b" a", b" \xef\xbf\xbd"), leaves=True)
    assert not written.is_due


@pytest.mark.parametrize(
    ("api", "body", "left"),
    [
        (COMPLETIONS, {}, 14),
        (CHAT, {"max_tokens": 8}, 6),
        (CHAT, {"max_tokens": 8, "max_completion_tokens": 5}, 3),
        (CHAT, {"max_tokens": 8, "max_completion_tokens": None}, 6),
        (CHAT, {}, 15),
        (CHAT, {"max_tokens": None}, 15),
    ],
    ids=said,
)
def test_the_rest_has_what_is_left_of_the_limit(api: Api, body: dict[str, Any], left: int | None) -> None:
    written = Written(api, body, room=20)
    followed(written, tokens(0, 1, begins=True) + tokens(1, 2))
    assert written.rest()["max_tokens"] == left


def test_the_rest_is_sampled_alike_and_its_prompt_is_not_cut_again() -> None:
    sampling = {"temperature": 0.5, "top_p": 0.5, "repetition_penalty": 1, "ignore_eos": True, "model": "tiny"}
    of_the_beginning = {"prompt": "a", "truncate_prompt_tokens": 3, "add_special_tokens": True, "seed": None}
    written = Written(COMPLETIONS, sampling | of_the_beginning | {"max_tokens": 9})
    followed(written, tokens(0, 1, begins=True))
    assert written.rest() == sampling | {"prompt": [*PROMPT_IDS, 10], "max_tokens": 8}


def test_an_answer_that_has_ended_does_not_move() -> None:
    written = Written(COMPLETIONS, {})
    followed(written, tokens(0, 1, begins=True))
    followed(written, tokens(5, 6), 10_000, leaves=True)
    assert not written.is_due


# Which answers


@pytest.mark.parametrize(
    ("api", "changed"),
    [
        (COMPLETIONS, {}),
        (COMPLETIONS, {"temperature": 0.7, "top_p": 0.5, "ignore_eos": True, "max_tokens": 1000}),
        (COMPLETIONS, {"seed": None, "stop": [], "n": 1, "presence_penalty": 0.0, "echo": False}),
        (COMPLETIONS, {"prompt": [7, 8], "truncate_prompt_tokens": 5, "stream_options": {"include_usage": True}}),
        (COMPLETIONS, {"prompt": ["one"]}),
        (CHAT, {}),
        (CHAT, {"max_tokens": 5}),
        (CHAT, {"max_tokens": None}),
        (CHAT, {"max_completion_tokens": 5, "reasoning_effort": "low", "logprobs": False, "tool_choice": "none"}),
        (
            CHAT,
            {
                "messages": [{"content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "tool_calls": []}],
                "max_tokens": 5,
            },
        ),
    ],
    ids=said,
)
def test_streams_of_plain_text_may_move(api: Api, changed: dict[str, Any]) -> None:
    assert may_move(api, {"stream": True, "model": "tiny"} | BODIES[api.path] | changed)


@pytest.mark.parametrize(
    ("api", "changed"),
    [
        (COMPLETIONS, {"stream": False}),
        (COMPLETIONS, {"seed": 7}),
        (COMPLETIONS, {"n": 2}),
        (COMPLETIONS, {"prompt": ["one", "two"]}),
        (COMPLETIONS, {"max_tokens": "6"}),
        (COMPLETIONS, {"max_tokens": 6.0}),
        (COMPLETIONS, {"max_tokens": True}),
        (COMPLETIONS, {"stop": "a"}),
        (COMPLETIONS, {"logprobs": 0}),
        (COMPLETIONS, {"echo": True}),
        (COMPLETIONS, {"min_tokens": 1}),
        (COMPLETIONS, {"presence_penalty": 0.5}),
        (COMPLETIONS, {"return_token_ids": True}),
        (COMPLETIONS, {"structured_outputs": {"json": {}}}),
        (COMPLETIONS, {"stream_options": {"continuous_usage_stats": True}}),
        (COMPLETIONS, {"messages": []}),
        (COMPLETIONS, {"a_parameter_of_next_year": 1}),
        (CHAT, {"seed": 7}),
        (CHAT, {"tools": [{}]}),
        (CHAT, {"max_completion_tokens": "6"}),
        (CHAT, {"max_tokens": None, "max_completion_tokens": 0}),
        (COMPLETIONS, {"max_tokens": None}),
        (CHAT, {"logprobs": True}),
        (CHAT, {"include_reasoning": False}),
        (CHAT, {"response_format": {"type": "json_object"}}),
        (CHAT, {"messages": [{"content": [{"type": "image_url"}]}]}),
        (CHAT, {"messages": ["a"]}),
        (CHAT, {"messages": "a"}),
        (MESSAGES, {"messages": [{"content": "a"}]}),
    ],
    ids=said,
)
def test_whatever_goes_by_the_place_in_the_output_or_is_no_text_stays(api: Api, changed: dict[str, Any]) -> None:
    base = {"stream": True, "model": "tiny", "max_tokens": 6}
    assert not may_move(api, base | BODIES.get(api.path, {}) | changed)


@pytest.mark.parametrize(
    "delta", [b'{"reasoning":" a"}', b"{}", b'{"content":" a","tool_calls":[]}', b'{"content":null}']
)
def test_a_chat_that_a_parser_has_changed_stays(delta: bytes) -> None:
    changed = tokens(1, 2, chat=True).replace(b'{"content":" b"}', delta)
    for middle, moves in ((tokens(1, 2, chat=True), True), (changed, False)):
        written = Written(CHAT, {})
        followed(written, role() + tokens(0, 1, chat=True) + middle + tokens(4, 5, chat=True), 10_000, leaves=True)
        assert written.is_due is moves
