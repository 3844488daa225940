"""Which prompts D computes by itself though they could take the detour over P."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from pd_proxy.detour import BEYOND, COMPARED, LONG, MEDIA, SHORT, SOONER, UNKNOWN, Choice, Detour, PromptSize
from pd_proxy.settings import AUTO
from tests.support.examples.fake_servers import TRANSFER, FakeServer, Received, Wire, answers
from tests.support.examples.served_proxy import ProxySetup
from tests.support.waiting import until


def of_tokens(number: int) -> PromptSize:
    return PromptSize(number, 0)


def against(detour: Detour, size: PromptSize) -> str | None:
    """Why D is to compute a stream's prompt by itself; None if it takes the detour."""
    choice = detour.choice(size, streams=True)
    return choice.reason if choice.alone else None


def over_p(reason: str) -> Choice:
    return Choice(alone=False, reason=reason)


# Lengths


@pytest.mark.parametrize(
    ("body", "ids", "characters"),
    [
        ({"prompt": "four", "max_tokens": 900}, 0, 4),
        ({"prompt": [1, 2, 3]}, 3, 0),
        ({"prompt": [[1, 2, 3]]}, 3, 0),
        ({"token_ids": [7, 8], "allowed_token_ids": [1, 2], "sampling_params": {"stop_token_ids": [1]}}, 2, 0),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}, 0, 13),
        ({"input": "ab", "instructions": "cd", "tools": [{"name": "e"}]}, 0, 5),
        ({"prompt": None, "model": "tiny", "user": "me", "cache_salt": "s", "request_id": "r"}, 0, 0),
        ({"messages": [1.5, [{"content": 7}], None]}, 0, 0),
    ],
    ids=str,
)
def test_texts_and_token_ids_of_a_body_count(body: dict[str, Any], ids: int, characters: int) -> None:
    assert PromptSize.of(body) == PromptSize(ids, characters)


def test_a_prompt_with_an_image_takes_the_detour_and_teaches_nothing() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}
    size = PromptSize.of({"messages": [image]})
    assert size.has_media
    assert Detour(900).choice(size, streams=True) == over_p(MEDIA)
    assert [against(Detour(way), size) for way in (900, AUTO)] == [None, None]
    detour = Detour(100)
    for _ in range(100):
        detour.learn(size, 2, alone=False, first_token_s=None)
    assert against(detour, PromptSize(0, 250)) == SHORT


@pytest.mark.parametrize("kind", ["image_embeds", "audio_embeds", "video_embeds"])
def test_embedded_media_count_as_media_also_if_only_their_shapes_are_sent(kind: str) -> None:
    part = {"type": kind, kind: {"shape": [1, 2, 2]}}
    assert PromptSize.of({"messages": [{"role": "user", "content": [part]}]}).has_media


@pytest.mark.parametrize("member", ["features", "content_parts"])
def test_media_beside_token_ids_count_as_media(member: str) -> None:
    """Of ``/inference/v1/generate``, which names them apart from its prompt."""
    media = {"features": {"mm_hashes": {"image": ["a"]}}, "content_parts": [{"type": "image_url", "url": "data:,"}]}
    assert PromptSize.of({"token_ids": [7, 8], member: media[member]}).has_media
    assert not PromptSize.of({"token_ids": [7, 8], member: None}).has_media


def test_a_deep_prompt_is_measured() -> None:
    deep: Any = "text"
    for _ in range(5000):
        deep = [deep]
    assert PromptSize.of({"input": deep}) == PromptSize(0, 4)


def test_how_many_characters_a_token_has_is_learnt() -> None:
    detour = Detour(100)
    text = PromptSize(0, 250)
    assert against(detour, text) == SHORT  # 62 tokens of four characters
    for _ in range(100):
        detour.learn(PromptSize(0, 200), 100, alone=False, first_token_s=None)
    assert against(detour, text) is None  # 125 of two
    for tokens in (3, 2000):  # an image that is no text, and a prompt that a server has added to
        for _ in range(100):
            detour.learn(PromptSize(0, 200), tokens, alone=False, first_token_s=None)
    assert against(detour, text) is None


# A fixed length


def test_a_number_is_that_of_the_shortest_prompt_that_takes_the_detour() -> None:
    assert [against(Detour(64), of_tokens(number)) for number in (1, 63, 64, 900)] == [SHORT, SHORT, None, None]
    assert against(Detour(0), of_tokens(0)) is None
    assert Detour(64).choice(of_tokens(64), streams=True) == over_p(LONG)


# auto


def served(detour: Detour, tokens: int, took: Callable[[bool], float], number: int) -> list[str | None]:
    """So many prompts of one length, each behind a long one, so that a tenth of all tokens is no limit."""
    reasons = []
    for _ in range(number):
        detour.learn(of_tokens(20_000), 20_000, alone=False, first_token_s=None)
        reasons.append(against(detour, of_tokens(tokens)))
        alone = reasons[-1] is not None
        detour.learn(of_tokens(tokens), tokens, alone=alone, first_token_s=took(alone))
    return reasons


def test_both_ways_are_tried_and_the_sooner_one_is_taken() -> None:
    sooner_alone = served(Detour(AUTO), 100, lambda alone: 0.1 if alone else 0.2, 200)
    assert sooner_alone.count(COMPARED) == 5
    assert sooner_alone.count(SOONER) >= 180
    later_alone = served(Detour(AUTO), 100, lambda alone: 0.2 if alone else 0.1, 200)
    assert later_alone.count(SOONER) == 0
    assert 5 <= later_alone.count(COMPARED) <= 15
    assert later_alone[:10].count(COMPARED) == 5


def test_a_change_is_noticed() -> None:
    detour = Detour(AUTO)
    assert served(detour, 100, lambda alone: 0.1 if alone else 0.2, 205)[-1] == SOONER
    assert served(detour, 100, lambda alone: 0.3 if alone else 0.2, 205)[-1] is None
    assert SOONER in served(detour, 100, lambda alone: 0.1 if alone else 0.2, 600)[-15:]


def test_each_length_is_judged_by_itself_and_long_prompts_always_take_the_detour() -> None:
    detour = Detour(AUTO)
    served(detour, 300, lambda alone: 0.4 if alone else 0.2, 60)
    assert set(served(detour, 60, lambda alone: 0.1 if alone else 0.2, 60)) == {None, COMPARED, SOONER}
    assert set(served(detour, 513, lambda _: 0.1, 60)) == {None}


@pytest.mark.parametrize("tokens", [32, 512])
def test_d_computes_no_more_than_a_tenth_of_all_tokens(tokens: int) -> None:
    detour, alone = Detour(AUTO), 0
    for number in range(1, 2000):
        reason = against(detour, of_tokens(tokens))
        alone += reason is not None
        known = None if reason else tokens  # by P
        detour.learn(of_tokens(tokens), known, alone=reason is not None, first_token_s=0.1 if reason else 0.2)
        assert alone <= 0.1 * number
    assert alone >= 180


def test_a_share_that_was_not_used_does_not_pile_up() -> None:
    detour = Detour(AUTO)
    for _ in range(1000):
        detour.learn(of_tokens(20_000), 20_000, alone=False, first_token_s=None)
    for _ in range(5):
        detour.learn(of_tokens(100), 100, alone=False, first_token_s=0.2)
        detour.learn(of_tokens(100), None, alone=True, first_token_s=0.1)
    assert sum(against(detour, of_tokens(100)) is not None for _ in range(1000)) <= 41


def test_a_prompt_that_p_refuses_adds_nothing_to_the_share() -> None:
    detour = Detour(AUTO)
    for _ in range(100):
        assert against(detour, PromptSize(0, 60_000_000)) is None
        detour.learn(PromptSize(0, 60_000_000), None, alone=False, first_token_s=None)
        assert against(detour, of_tokens(40)) is None
        detour.learn(of_tokens(40), None, alone=False, first_token_s=0.2)


def test_the_detour_has_a_reason_too() -> None:
    detour = Detour(AUTO)
    assert detour.choice(of_tokens(513), streams=True) == over_p(LONG)
    assert detour.choice(of_tokens(100), streams=True) == over_p(BEYOND)
    detour.learn(of_tokens(20_000), 20_000, alone=False, first_token_s=None)
    assert detour.choice(of_tokens(100), streams=True) == over_p(COMPARED)
    served(detour, 100, lambda alone: 0.2 if alone else 0.1, 10)
    assert detour.choice(of_tokens(100), streams=True) == over_p(SOONER)


def test_what_is_no_stream_teaches_nothing_and_is_not_used_to_compare() -> None:
    detour, whole = Detour(AUTO), of_tokens(100)
    for _ in range(50):
        detour.learn(of_tokens(20_000), 20_000, alone=False, first_token_s=None)
        assert detour.choice(whole, streams=False) == over_p(UNKNOWN)
        detour.learn(whole, 100, alone=False, first_token_s=None)
    served(detour, 100, lambda alone: 0.1 if alone else 0.2, 20)  # the last one was a trial
    for _ in range(50):
        detour.learn(of_tokens(20_000), 20_000, alone=False, first_token_s=None)
        assert detour.choice(whole, streams=False) == Choice(alone=True, reason=SOONER)


# In the proxy


def test_short_prompts_are_ds_alone_and_counted(
    setup: ProxySetup, p: FakeServer, d: FakeServer, access_lines: Callable[[int], list[str]]
) -> None:
    proxy = setup.proxy([p], [d], prefill_from=64)
    proxy.complete(prompt=[1] * 63)
    assert (p.received, d.bodies) == ([], [{"model": "tiny", "prompt": [1] * 63}])
    proxy.complete(prompt=[1] * 64)
    assert (len(p.received), len(d.received)) == (1, 2)
    assert "not disaggregated: a short prompt" in access_lines(2)[0]
    assert "detour: a long prompt" in access_lines(2)[1]
    metrics = proxy.http.get("/metrics").text
    assert 'pd_proxy_not_disaggregated_total{reason="a short prompt"} 1' in metrics
    assert 'pd_proxy_detours_total{reason="a long prompt"} 1' in metrics


def test_auto_learns_from_streams(setup: ProxySetup, p: FakeServer, d: FakeServer) -> None:
    async def streams(received: Received, wire: Wire) -> None:
        if received.path.startswith("/v1"):
            await wire.head()
            await wire.chunk(b"data: [DONE]\n\n")
            await wire.end()

    p.script = answers(200, json.dumps({"kv_transfer_params": TRANSFER, "usage": {"prompt_tokens": 9000}}).encode())
    d.script = streams
    proxy = setup.proxy([p], [d], prefill_from=AUTO)
    for _ in range(40):
        proxy.complete(prompt=[1] * 50, stream=True)
    reasons = 'pd_proxy_not_disaggregated_total{reason="a short prompt, '

    def alone() -> int:
        counted = [line for line in proxy.http.get("/metrics").text.splitlines() if line.startswith(reasons)]
        return sum(int(line.rsplit(" ", 1)[1]) for line in counted)

    until(lambda: alone() == len(d.received) - len(p.received))  # a request is counted when its client has the end
    assert alone() >= 5
