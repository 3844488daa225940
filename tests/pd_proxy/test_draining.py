"""A decode server that is to be restarted hands over its answers: how they go on, where, and what clients get."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import pd_proxy.draining
import pd_proxy.servers
from pd_proxy.apis import CHAT, COMPLETIONS, Api
from tests.support.examples.fake_servers import (
    NAMED_TRANSFER,
    ROOM,
    FakeServer,
    Received,
    Script,
    Wire,
    answers,
    decodes,
    prefills_by_name,
    stalls,
)
from tests.support.examples.harness import RawClient
from tests.support.examples.moving import DONE, PROMPT_IDS, WHOLE, Decoder, Moving, event, events_of, text_of, tokens
from tests.support.examples.served_proxy import ProxySetup
from tests.support.waiting import holds_for, until

KINDS = pytest.mark.parametrize("api", [COMPLETIONS, CHAT], ids=lambda api: str(api.path))


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pd_proxy.draining, "_INTERVAL_S", 0.01)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """What names the decode servers; not there yet."""
    return tmp_path / "draining"


# What another server gets, and the client


@KINDS
@pytest.mark.parametrize("legs", ["in-turn", "together"])
def test_another_server_goes_on_behind_the_text_so_far(
    setup: ProxySetup, p: FakeServer, file: Path, access_lines: Callable[[int], list[str]], api: Api, legs: str
) -> None:
    first = Decoder("first", waits_at=1)
    moving = Moving(setup, p, file, first, Decoder("second"), legs=legs)
    answer = moving.drained(first, api=api, temperature=0.5, repetition_penalty=1)
    assert text_of(answer) == WHOLE
    assert answer.endswith(DONE)
    events = events_of(answer)
    assert {(one["id"], one["created"], one["model"]) for one in events} == {("first", 8, "tiny")}
    assert events[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    ends = [choice["finish_reason"] for one in events for choice in one["choices"]]
    assert ends == [*[None] * (len(ends) - 1), "length"]
    assert b'_ids":[' not in answer
    if api.is_chat:
        assert [one["choices"][0]["delta"].get("role") for one in events[:-1]].count("assistant") == 1
    assert moving.servers[0].received[0].left.wait(30)
    assert moving.servers[0].received[0].headers["accept-encoding"] == "identity"
    rest = {"prompt": [*PROMPT_IDS, 10, 11], "stream": True, "temperature": 0.5, "repetition_penalty": 1}
    kept = {"max_tokens": 4, "return_token_ids": True, "kv_transfer_params": NAMED_TRANSFER}
    assert moving.servers[1].bodies == [rest | kept]
    assert (p.received[1].path, p.bodies[1]["prompt"]) == (COMPLETIONS.path, rest["prompt"])
    (_, line) = access_lines(2)
    assert f"D={moving.servers[0].url} legs={legs} " in line
    assert f" moved={moving.servers[1].url}" in line
    assert moving.status()["ended"][-1]["decode_url"] == moving.servers[1].url
    assert moving.counted() == [("continued", "1"), ("failed", "0")]


@KINDS
def test_where_the_file_says_where_it_is_found_another_server_has_the_rest_alone(
    setup: ProxySetup, p: FakeServer, file: Path, api: Api
) -> None:
    first = Decoder("first", waits_at=1)
    moving = Moving(setup, p, file, first, Decoder("second"))
    assert text_of(moving.drained(first, "10.0.0.1:8998", api=api)) == WHOLE
    assert len(p.received) == 1
    (rest,) = moving.servers[1].bodies
    assert (rest["prompt"], rest["kv_transfer_params"]) == ([*PROMPT_IDS, 10, 11], {"prefixes_at": "10.0.0.1:8998"})
    assert moving.counted() == [("continued", "1"), ("failed", "0")]


def test_a_rest_that_fails_there_is_computed_without_being_looked_for(
    setup: ProxySetup, p: FakeServer, file: Path
) -> None:
    async def refuses(_: Received, wire: Wire) -> None:
        await wire.json(500, {"error": {"message": "no"}})

    first = Decoder("first", waits_at=1)
    moving = Moving(setup, p, file, first, refuses, Decoder("third"))
    assert text_of(moving.drained(first, "10.0.0.1:8998")) == WHOLE
    assert [body.get("kv_transfer_params") for body in moving.servers[1].bodies] == [{"prefixes_at": "10.0.0.1:8998"}]
    assert ["kv_transfer_params" in body for body in moving.servers[2].bodies] == [False]
    assert len(p.received) == 1


@pytest.mark.parametrize(("limit", "left"), [(2, []), (3, [1])])
def test_an_answer_whose_limit_is_reached_where_it_would_move_has_ended(
    setup: ProxySetup, p: FakeServer, file: Path, limit: int, left: list[int]
) -> None:
    first = Decoder("first", waits_at=1)
    moving = Moving(setup, p, file, first, Decoder("second"))
    answer = moving.drained(first, max_tokens=limit)
    assert text_of(answer) == " a b"
    assert events_of(answer)[-1]["usage"]["completion_tokens"] == limit
    assert [body["max_tokens"] for body in moving.servers[1].bodies] == left


@pytest.mark.parametrize("says_room", [True, False])
def test_a_chat_without_a_limit_moves_if_a_server_says_how_much_room_there_is(
    setup: ProxySetup, p: FakeServer, file: Path, says_room: bool
) -> None:
    first, second = Decoder("first", waits_at=1, stays=not says_room), Decoder("second")

    async def silent(received: Received, wire: Wire) -> None:
        await (wire.json(200, {"data": [{"id": "tiny"}]}) if received.path == "/v1/models" else first(received, wire))

    moving = Moving(setup, p, file, first if says_room else silent, second)
    moving.answer(api=CHAT, max_tokens=None)  # the first such chat, after which the proxy knows
    moving.servers[1].received.clear()
    answer = moving.drained(first, api=CHAT, max_tokens=None)
    assert text_of(answer) == WHOLE
    assert events_of(answer)[-1]["usage"]["completion_tokens"] == 6
    assert [body["max_tokens"] for body in moving.servers[1].bodies] == ([ROOM - 5] if says_room else [])


def test_who_is_told_nothing_of_a_model_does_not_decide_for_others(
    setup: ProxySetup, p: FakeServer, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has no key, say, or has left."""
    monkeypatch.setattr(pd_proxy.servers, "_ROOM_AGAIN_S", 0.0)
    first, second, refusals = Decoder("first", waits_at=1), Decoder("second"), iter([401])

    async def refuses_once(received: Received, wire: Wire) -> None:
        status = next(refusals, 0) if received.path == "/v1/models" else 0
        await (wire.json(status, {}) if status else first(received, wire))

    moving = Moving(setup, p, file, refuses_once, second)
    for _ in range(2):
        moving.answer(api=CHAT, max_tokens=None)
    moving.servers[1].received.clear()
    assert text_of(moving.drained(first, api=CHAT, max_tokens=None)) == WHOLE
    assert [body["max_tokens"] for body in moving.servers[1].bodies] == [ROOM - 5]


def test_a_chat_without_a_limit_does_not_wait_for_who_is_silent_about_its_model(
    setup: ProxySetup, p: FakeServer, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pd_proxy.servers, "_ROOM_WAIT_S", 0.05)

    async def silent(received: Received, wire: Wire) -> None:
        await (stalls if received.path == "/v1/models" else Decoder("first"))(received, wire)

    moving = Moving(setup, p, file, silent, silent)
    for _ in range(2):
        assert text_of(moving.answer(api=CHAT, max_tokens=None)) == WHOLE
    asked = [received.path for server in moving.servers for received in server.received]
    assert asked.count("/v1/models") == 1


def test_cached_tokens_are_those_of_the_clients_prompt(setup: ProxySetup, p: FakeServer, file: Path) -> None:
    first = Decoder("first", waits_at=1)
    moving = Moving(setup, p, file, first, Decoder("second"))

    async def counts(received: Received, wire: Wire) -> None:
        cached = 2 if len(p.received) == 1 else 5
        usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": cached}}
        await wire.json(200, {"choices": [], "usage": usage, "kv_transfer_params": NAMED_TRANSFER})

    async def details(received: Received, wire: Wire) -> None:
        await wire.head()
        usage = {"completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}
        await wire.chunk(tokens(2, 6, begins=True) + event("x", choices=[], usage=usage) + DONE)
        await wire.end()

    p.script, moving.servers[1].script = counts, details
    usage = events_of(moving.drained(first))[-1]["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert (usage["prompt_tokens"], usage["total_tokens"]) == (3, 9)


def test_an_answer_that_began_with_ps_token_moves_too(setup: ProxySetup, p: FakeServer, file: Path) -> None:
    async def prefills(received: Received, wire: Wire) -> None:
        choice = {"text": " a", "prompt_token_ids": PROMPT_IDS, "token_ids": [10]}
        await wire.json(200, {"id": "p", "choices": [choice], "kv_transfer_params": NAMED_TRANSFER})

    first = Decoder("first", waits_at=1)
    moving = Moving(setup, p, file, first, Decoder("second"))
    p.script = prefills
    assert text_of(moving.drained(first, temperature=0)) == WHOLE
    assert moving.counted() == [("continued", "1"), ("failed", "0")]
    assert ["ignore_eos" in body for body in p.bodies] == [False, True]  # the rest's first token is D's


def test_ids_are_asked_for_only_where_an_answer_may_move(setup: ProxySetup, p: FakeServer, file: Path) -> None:
    moving = Moving(setup, p, file, Decoder("first"), Decoder("second"))
    moving.answer(seed=7)
    alone = Moving(setup, p, file, Decoder("first"))
    alone.answer()
    chats = Moving(setup, p, file, Decoder("first"), Decoder("second"), plain_chats=False)
    chats.answer(api=CHAT)
    assert not any("return_token_ids" in one.servers[0].bodies[0] for one in (moving, alone, chats))


def test_an_answer_that_d_does_not_write_in_two_legs_moves_too(setup: ProxySetup, p: FakeServer, file: Path) -> None:
    first = Decoder("first", waits_at=1)
    moving = Moving(setup, p, file, first, Decoder("second"), prefill_from=100)
    assert text_of(moving.drained(first)) == WHOLE
    assert [body["prompt"] for body in p.bodies] == [[*PROMPT_IDS, 10, 11]]


# Who gets it


def test_an_answer_may_move_again_and_servers_come_back(setup: ProxySetup, p: FakeServer, file: Path) -> None:
    first, second = Decoder("first", waits_at=1), Decoder("second", waits_at=4)
    moving = Moving(setup, p, file, first, second, Decoder("third"))

    def restart(server: int, decoder: Decoder) -> None:
        moving.drain(moving.servers[server])
        decoder.gate.set()

    assert text_of(moving.answer(lambda: restart(0, first), lambda: restart(1, second))) == WHOLE
    assert [body["prompt"] for body in moving.servers[2].bodies] == [[*PROMPT_IDS, 10, 11, 12, 13, 14]]
    assert moving.counted() == [("continued", "2"), ("failed", "0")]
    moving.drain()  # waits until none is leaving


def test_a_server_that_is_leaving_gets_nothing_new_while_another_is_there(
    setup: ProxySetup, p: FakeServer, file: Path
) -> None:
    moving = Moving(setup, p, file, decodes, decodes)
    moving.drain(moving.servers[0])
    for _ in range(3):
        assert moving.proxy.complete().status_code == 200
        assert moving.proxy.http.get("/v1/models").status_code == 200
    assert ([len(server.received) for server in moving.servers]) == [0, 6]
    setup.stop(moving.servers[1])
    assert moving.proxy.complete().status_code == 200
    assert len(moving.servers[0].received) == 1


@pytest.mark.parametrize(("other", "skip_s"), [("leaving", 5), ("down", 5), ("down", 0.001)])
def test_where_no_other_server_is_there_the_answer_stays(
    setup: ProxySetup, p: FakeServer, file: Path, other: str, skip_s: float
) -> None:
    first = Decoder("first", waits_at=1, stays=True)
    moving = Moving(setup, p, file, first, Decoder("second"), skip_s=skip_s)

    def drain() -> None:
        if other == "down":
            setup.stop(moving.servers[1])
            moving.drain(moving.servers[0])
        else:
            moving.drain(*moving.servers)
        first.gate.set()

    assert text_of(moving.answer(drain)) == WHOLE
    asked = [len(server.received) for server in moving.servers]
    assert asked == ([2, 0] if other == "down" else [1, 0])  # the first one again, once that is known


def test_the_file_is_read_before_the_first_request_and_names_servers_of_both_legs(
    setup: ProxySetup, p: FakeServer, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pd_proxy.draining, "_INTERVAL_S", 60)
    leaving, other, other_p = setup.server(decodes), setup.server(decodes), setup.server(prefills_by_name)
    file.write_text(f"{leaving.url}\n{p.url}", encoding="utf-8-sig")  # as some editors write it
    assert setup.proxy([p, other_p], [leaving, other], draining=str(file)).complete().status_code == 200
    assert [len(server.received) for server in (p, other_p, leaving, other)] == [0, 1, 0, 1]


def test_names_that_are_none_of_its_servers_and_files_that_cannot_be_read_are_told_once(
    setup: ProxySetup, p: FakeServer, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    moving = Moving(setup, p, file, decodes, decodes)
    moving.drain(moving.servers[0])
    moving.write(b"\xff")
    until(lambda: "cannot be read" in caplog.text)
    assert "leaving" in {one["state"] for one in moving.status()["servers"]}
    moving.write(f"http://nowhere:1\n\n{moving.servers[0].url}".encode())
    until(lambda: "'http://nowhere:1', which is none" in caplog.text)
    holds_for(lambda: caplog.text.count("http://nowhere:1") == 1, 0.1)
    moving.drain()
    said = [record.getMessage() for record in caplog.records if record.name == "pd_proxy.draining"]
    assert [one.count("is leaving") for one in said] == [1, 0, 0, 0]
    assert "is back; it has 0 requests" in said[-1]


def test_two_servers_in_one_line_are_none_and_told(
    setup: ProxySetup, p: FakeServer, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    moving = Moving(setup, p, file, decodes, decodes)
    first, second, *_ = moving.servers
    moving.write(f"{first.url} {second.url}\n".encode())
    until(lambda: f"names '{first.url} {second.url}', which is none of the servers" in caplog.text)


def test_a_pipe_holds_nothing_up(
    setup: ProxySetup, p: FakeServer, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(file)
    assert setup.proxy([p], [setup.server(decodes)], draining=str(file)).complete().status_code == 200
    assert "cannot be read (it is no regular file)" in caplog.text


def test_the_file_is_looked_at_again_whatever_went_wrong(
    setup: ProxySetup, p: FakeServer, file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving = Moving(setup, p, file, decodes, decodes)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "read_text", lambda *_, **__: 1 / 0)
        until(lambda: "was not looked at" in caplog.text)
    moving.drain(moving.servers[0])


# What can go wrong


async def refuses(received: Received, wire: Wire) -> None:
    """A prefill server that takes no rests."""
    if isinstance(received.body["prompt"], list):
        await wire.json(400, {"error": {"message": "too long"}})
    else:
        await prefills_by_name(received, wire)


async def writes_and_tells_of_an_error(_: Received, wire: Wire) -> None:
    await wire.head()
    written = tokens(2, 3, begins=True) + tokens(3, 4) + tokens(4, 5)
    await wire.chunk(written + b'data: {"error":{"message":"secret","code":500}}\n\n' + DONE)
    await wire.end()


async def begins_with_an_error(_: Received, wire: Wire) -> None:
    await wire.head()
    await wire.chunk(b'data: {"error":{"message":"secret","code":500}}\n\n' + DONE)
    await wire.end()


@pytest.mark.parametrize(
    ("failing", "written"),
    [
        ("P", []),
        ("D answers 500", []),
        ("D tells of an error", []),
        ("D writes and tells of an error", [12, 13, 14]),
        ("D breaks off at once", []),
        ("D breaks off in a character", []),
        ("D breaks off", [12, 13]),
    ],
)
def test_if_that_fails_a_decode_server_goes_on_alone(
    setup: ProxySetup, p: FakeServer, file: Path, failing: str, written: list[int]
) -> None:
    scripts: dict[str, Script] = {
        "P": Decoder("second"),
        "D answers 500": answers(500, b"{}"),
        "D tells of an error": begins_with_an_error,
        "D writes and tells of an error": writes_and_tells_of_an_error,
        "D breaks off at once": Decoder("second", breaks_at=2),
        "D breaks off in a character": Decoder("second", breaks_at=3),
        "D breaks off": Decoder("second", breaks_at=4),
    }
    first = Decoder("first", waits_at=1)
    moving = Moving(setup, p, file, first, scripts[failing], Decoder("third"))
    if failing == "P":
        p.script = refuses
    assert text_of(moving.drained(first)) == WHOLE
    last = moving.servers[1 if failing == "P" else 2]
    assert "kv_transfer_params" not in last.bodies[0]
    assert last.bodies[0]["prompt"] == [*PROMPT_IDS, 10, 11, *written]
    assert moving.counted() == [("continued", "1"), ("failed", "0")]


def test_where_the_only_other_server_fails_the_one_that_is_leaving_goes_on_to_the_end(
    setup: ProxySetup, p: FakeServer, file: Path
) -> None:
    first = Decoder("first", waits_at=1)
    moving = Moving(setup, p, file, first, answers(500, b"{}"))
    assert text_of(moving.drained(first)) == WHOLE
    assert [len(server.received) for server in moving.servers] == [2, 1]


def test_the_server_that_failed_is_asked_last_even_if_it_has_the_fewest_requests(
    setup: ProxySetup, p: FakeServer, file: Path
) -> None:
    async def third(received: Received, wire: Wire) -> None:
        await (stalls if received.body.get("seed") else Decoder("third"))(received, wire)

    first = Decoder("first", waits_at=1)
    moving = Moving(setup, p, file, first, answers(500, b"{}"), third)
    moving.drain(*moving.servers[:2])
    body = json.dumps({"prompt": "a", "stream": True, "seed": 7}).encode()
    busy = RawClient.completing(moving.proxy, body)
    moving.servers[2].wait()
    moving.drain(moving.servers[1], moving.servers[2])
    assert text_of(moving.drained(first)) == WHOLE
    busy.leave()
    assert [len(server.received) for server in moving.servers] == [1, 1, 2]


def test_if_no_prefill_server_is_left_a_decode_server_goes_on_alone(
    setup: ProxySetup, p: FakeServer, file: Path
) -> None:
    first = Decoder("first", waits_at=1)
    moving = Moving(setup, p, file, first, Decoder("second"))

    def drain() -> None:
        setup.stop(p)
        moving.drain(moving.servers[0])
        first.gate.set()

    assert text_of(moving.answer(drain)) == WHOLE
    assert "kv_transfer_params" not in moving.servers[1].bodies[0]


def test_an_answer_that_fails_twice_ends_with_an_error(
    setup: ProxySetup, p: FakeServer, file: Path, access_lines: Callable[[int], list[str]]
) -> None:
    first = Decoder("first", waits_at=1)
    moving = Moving(setup, p, file, first, begins_with_an_error, answers(503, b"secret"))
    answer = moving.drained(first)
    assert text_of(answer) == " a b"
    assert events_of(answer)[-1]["error"]["message"] == "a decode server answered with status 503"
    assert moving.counted() == [("continued", "0"), ("failed", "1")]
    line = access_lines(2)[-1]
    assert f" moved={moving.servers[2].url} problem: decode server {moving.servers[2].url} answered" in line


def test_where_the_last_token_may_be_half_a_server_that_breaks_off_is_the_end(
    setup: ProxySetup, p: FakeServer, file: Path
) -> None:
    async def breaks_off(_: Received, wire: Wire) -> None:
        await wire.head()
        await wire.chunk(tokens(2, 5, begins=True))
        wire.drop()

    first = Decoder("first", waits_at=1)
    moving = Moving(setup, p, file, first, breaks_off, Decoder("third"))
    answer = moving.drained(first)
    assert "error" in events_of(answer)[-1]
    assert moving.servers[2].received == []


def test_a_client_that_leaves_while_its_answer_moves_leaves_nothing(
    setup: ProxySetup, p: FakeServer, file: Path, access_lines: Callable[[int], list[str]]
) -> None:
    first = Decoder("first", waits_at=1)
    moving = Moving(setup, p, file, first, stalls)
    client = RawClient.completing(moving.proxy, json.dumps({"prompt": "a", "stream": True, "max_tokens": 6}).encode())
    client.receive_until(b" a")
    moving.drain(moving.servers[0])
    first.gate.set()
    rest = moving.servers[1].wait()
    client.leave()
    assert rest.left.wait(30)
    assert "status=499" in access_lines(2)[-1]
    assert moving.counted() == [("continued", "0"), ("failed", "0")]
