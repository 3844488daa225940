"""The status page: what it is told, what it is never told, and what bounds it."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from pd_proxy import recent, status
from pd_proxy.control import ControlAddresses
from pd_proxy.journal import Record
from pd_proxy.recent import MAX_COUNTED, MAX_ENDED, Recent
from pd_proxy.status import MAX_PAGES, StatusPage
from tests.support.examples.fake_servers import (
    FakeServer,
    Received,
    Wire,
    answers,
    drops,
    prefills_by_name,
    stalls,
)
from tests.support.examples.harness import RawClient
from tests.support.examples.served_proxy import Proxy, ProxySetup
from tests.support.waiting import until

SECRET = "the-secret-word"
EVENTS = b"GET /status/events HTTP/1.1\r\nHost: proxy\r\n\r\n"


@pytest.fixture
def proxy(setup: ProxySetup, p: FakeServer, d: FakeServer) -> Proxy:
    return setup.proxy([p], [d], status_page=True, api_key="key-of-the-servers")


@contextmanager
def news(proxy: Proxy, seen: str = "") -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    """The events of an open page: ids and what they say."""
    headers = {"Last-Event-ID": seen} if seen else {}
    with proxy.http.stream("GET", "/status/events", headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        pairs = ((line, next(lines)) for line in lines if line.startswith("id: "))
        yield ((one.removeprefix("id: "), json.loads(data.removeprefix("data: "))) for one, data in pairs)


def state(proxy: Proxy) -> dict[str, Any]:
    with news(proxy) as events:
        return next(events)[1]


def failure_of(proxy: Proxy) -> str:
    """The failure of the only request."""
    (one,) = until(lambda: state(proxy)["ended"])
    return str(one["failure"])


def test_there_is_no_page_unless_it_is_asked_for(setup: ProxySetup, p: FakeServer, d: FakeServer) -> None:
    proxy = setup.proxy([p], [d])
    assert [proxy.http.get(path).status_code for path in ("/status", "/status/events")] == [404, 404]


def test_the_page_runs_its_own_script_and_nothing_else(proxy: Proxy) -> None:
    page = proxy.http.get("/status")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == 2
    assert "innerHTML" not in page.text
    assert "http" not in page.text.replace("http://www.w3.org/2000/svg", "").replace("https?:", "")


def test_a_request_is_shown_with_its_servers_and_times(proxy: Proxy, p: FakeServer, d: FakeServer) -> None:
    p.script = prefills_by_name
    proxy.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "my-id"})
    (one,) = until(lambda: state(proxy)["ended"])
    assert (one["identity"], one["status"], one["failure"], one["legs"]) == ("my-id", 200, "", "in-turn")
    assert (one["prefill_url"], one["decode_url"]) == (p.url, d.url)
    order = ["prefill_began", "prefill_ended", "decode_began", "first_byte", "ended"]
    times = [one[name] for name in order]
    assert times == sorted(times)
    assert times[0] >= 0
    servers = {(shown["leg"], shown["url"]): shown for shown in state(proxy)["servers"]}
    assert servers["prefill", p.url] == {
        "leg": "prefill",
        "url": p.url,
        "in_flight": 0,
        "state": "serves",
        "control": "[::1]:4711",
    }
    assert servers["decode", d.url]["control"] == ""


def test_a_request_under_way_is_shown_and_moves_to_those_that_ended(proxy: Proxy, d: FakeServer) -> None:
    d.script = stalls
    client = RawClient.completing(proxy, b'{"prompt": "a"}')
    d.wait()
    (one,) = state(proxy)["under_way"]
    assert one["prefill_ended"] is not None
    assert (one["first_byte"], one["ended"], one["decode_url"]) == (None, None, d.url)
    client.leave()
    assert failure_of(proxy) == "the client left"
    assert state(proxy)["under_way_count"] == 0


def test_what_generates_nothing_is_not_shown(proxy: Proxy) -> None:
    assert proxy.http.get("/v1/models").status_code == 200
    proxy.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "my-id"})
    assert [one["identity"] for one in until(lambda: state(proxy)["ended"])] == ["my-id"]


def test_how_often_each_way_was_chosen_is_shown_by_reason(setup: ProxySetup, p: FakeServer, d: FakeServer) -> None:
    proxy = setup.proxy([p], [d], status_page=True, prefill_from=3)
    for prompt in ([1], [1] * 3, [1] * 4, ["several", 7]):
        proxy.complete(prompt=prompt)
    until(lambda: len(state(proxy)["ended"]) == 4)
    assert state(proxy)["choices"] == [
        {"alone": False, "reason": "a long prompt", "count": 2},
        {"alone": True, "reason": "a short prompt", "count": 1},
    ]


def test_an_open_page_hears_of_each_request_once(proxy: Proxy) -> None:
    with news(proxy) as events:
        seen, first = next(events)
        proxy.complete()
        found = until(lambda: next(events)[1]["ended"])
        assert (first["ended"], first["from_start"], len(found)) == ([], True, 1)
    with news(proxy, f"{seen.partition('-')[0]}-1") as events:
        assert next(events)[1]["ended"] == []
    with news(proxy, "another-1") as events:  # of a proxy that was here before
        assert len(next(events)[1]["ended"]) == 1


async def echoes(received: Received, wire: Wire) -> None:
    """A server that puts the prompt into its error."""
    await wire.json(500, {"error": {"message": f"cannot tokenize {received.body['prompt']}"}})


async def echoes_in_plain_text(received: Received, wire: Wire) -> None:
    await wire.whole(500, f"cannot tokenize {received.body['prompt']}".encode())


async def echoes_in_a_stream(received: Received, wire: Wire) -> None:
    await wire.head()
    error = {"message": f"cannot decode {received.body['prompt']}", "code": 500}
    await wire.chunk(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
    await wire.end()


@pytest.mark.parametrize(
    ("leg", "script", "cause"),
    [
        ("prefill", echoes, "prefill server {p} refused with status 500"),
        ("prefill", echoes_in_plain_text, "prefill server {p} answered with status 500"),
        ("prefill", drops, "prefill server {p} broke off"),
        ("decode", echoes, "decode server {d} answered with status 500"),
        ("decode", echoes_in_a_stream, "decode server {d} began its stream with an error of status 500"),
        ("decode", drops, "decode server {d} broke off"),
    ],
)
def test_a_failure_has_its_cause_and_no_word_of_the_prompt(
    proxy: Proxy, p: FakeServer, d: FakeServer, leg: str, script: Any, cause: str
) -> None:
    (p if leg == "prefill" else d).script = script
    proxy.complete(prompt=SECRET, stream=True)
    assert failure_of(proxy).startswith(cause.format(p=p.url, d=d.url))
    shown = json.dumps(state(proxy))
    assert SECRET not in shown
    assert "key-of-the-servers" not in shown


def test_a_prompt_and_an_answer_are_not_kept(proxy: Proxy, d: FakeServer) -> None:
    d.script = answers(200, json.dumps({"choices": [{"text": SECRET}]}).encode())
    proxy.complete(prompt=SECRET)
    proxy.http.post("/v1/completions", content=b'{"prompt": "' + SECRET.encode())
    until(lambda: len(state(proxy)["ended"]) == 2)
    assert SECRET not in json.dumps(state(proxy))


def test_more_pages_than_are_kept_up_to_date_are_refused(proxy: Proxy) -> None:
    pages = [RawClient(proxy, EVENTS) for _ in range(MAX_PAGES)]
    for page in pages:
        page.receive_until(b"data: ")
    refused = proxy.http.get("/status/events")
    assert (refused.status_code, "close one" in refused.json()["error"]["message"]) == (503, True)
    for page in pages:
        page.leave()


def test_pages_that_come_at_once_are_counted_and_those_that_leave_before_their_first_event() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(_: Message) -> None:
        raise OSError  # how ASGI servers say that the client has left

    async def opened_and_left() -> list[int]:
        page = StatusPage((), ControlAddresses(), Recent())
        endpoint = page.routes[1].endpoint
        statuses = []
        for _ in range(2):
            scope = {"type": "http", "asgi": {"spec_version": "2.4"}, "headers": []}
            opened = [await endpoint(Request(scope)) for _ in range(MAX_PAGES + 1)]
            statuses += [one.status_code for one in opened]
            for one in opened[:-1]:
                with pytest.raises(ClientDisconnect):
                    await one(scope, receive, send)
        return statuses

    assert asyncio.run(opened_and_left()) == ([200] * MAX_PAGES + [503]) * 2


def test_only_so_many_requests_are_kept_and_only_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Recent()
    for number in range(MAX_ENDED + 50):
        record = Record("/v1/completions")
        record.identity, record.problem = f"{number}" * 500, "x" * 5000
        kept.begin(record)
        record.ended = record.started + 0.5
        kept.end(record)
    ended = kept.ended_after(0)
    assert [one["place"] for one in ended] == list(range(51, MAX_ENDED + 51))
    assert max(len(one["identity"]) for one in ended) <= 64
    assert max(len(one["failure"]) for one in ended) <= 300
    assert kept.ended_after(MAX_ENDED + 49) == ended[-1:]
    monkeypatch.setattr(recent, "KEPT_S", -10.0)
    assert kept.ended_after(0) == []
    assert kept.count_under_way() == 0


def test_an_open_page_has_to_come_back(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_CONNECTION_S", 0.01)
    with news(proxy) as events:
        assert len(list(events)) == 1


def test_what_a_server_last_did_is_its_state(setup: ProxySetup, p: FakeServer, d: FakeServer, closed_port: str) -> None:
    def states(proxy: Proxy) -> list[str]:
        return [one["state"] for one in state(proxy)["servers"]]

    proxy = setup.proxy([closed_port, p], [d], skip_s=60, status_page=True)
    assert states(proxy) == ["unknown", "unknown", "unknown"]
    proxy.complete()
    assert states(proxy) == ["refused", "serves", "serves"]
    proxy = setup.proxy([closed_port], [d], skip_s=60, status_page=True)
    proxy.complete()
    assert states(proxy) == ["refused", "unknown"]
    computing = setup.server(stalls, port=int(closed_port.rsplit(":", 1)[1]))
    client = RawClient.completing(proxy, b'{"prompt": "a"}')
    computing.wait()
    assert states(proxy)[0] == "unsure"
    client.leave()
    setup.stop(computing)
    proxy = setup.proxy([closed_port], [d], skip_s=1e-9, status_page=True)  # it may be back at once
    proxy.complete()
    assert states(proxy) == ["unsure", "unknown"]
    setup.server(prefills_by_name, port=int(closed_port.rsplit(":", 1)[1]))
    proxy.complete()
    assert states(proxy) == ["serves", "serves"]


def end(kept: Recent, ended: float, *, prefill_s: float = 0.1, handover_s: float = 0.0, **facts: Any) -> None:
    """Let a stream with both legs at once end at this moment, ten seconds after it came in."""
    record = Record("/v1/completions")
    kept.begin(record)
    record.started = ended - 10
    record.streams, record.legs, record.status = True, "together", 200
    record.prefill_at = record.decode_at = record.started + 1
    record.prefill_s, record.first_byte_s = prefill_s, prefill_s + handover_s
    record.ended = ended
    for name, value in facts.items():
        setattr(record, name, value)
    kept.end(record)


def test_the_last_minute_in_figures() -> None:
    kept = Recent()
    now = time.monotonic() + 1000
    end(kept, now - 61, prefill_s=9, handover_s=9)
    for n in range(1, 21):
        end(kept, now - 61 + 2 * n, prefill_s=n / 10, handover_s=n / 100)
    end(kept, now - 3, prefill_s=9, streams=False)
    end(kept, now - 2, prefill_s=9, problem="the client left")
    end(kept, now - 1, prefill_s=9, status=500)
    found = kept.last_minute(now)
    assert (found["window_s"], found["requests"], found["streams"], found["failures"]) == (60, 23, 20, 2)
    assert found["requests_per_s"] == pytest.approx(23 / 60)
    assert found["first_token_p50_s"] == pytest.approx(1 + 1 + 0.1)  # it came in a second before its legs began
    assert found["first_token_p95_s"] == pytest.approx(1 + 1.9 + 0.19)
    assert found["handover_p50_s"] == pytest.approx(0.1)


def test_a_first_token_may_be_p_s_and_needs_no_p() -> None:
    kept = Recent()
    now = time.monotonic() + 1000
    end(kept, now, prefill_s=1, handover_s=3, first_token_at=now - 10 + 3)
    assert kept.last_minute(now)["first_token_p50_s"] == pytest.approx(1 + 2)
    kept = Recent()
    end(kept, now, legs="", prefill_at=None, first_byte_s=4)
    found = kept.last_minute(now)
    assert found["first_token_p50_s"] == pytest.approx(1 + 4)
    assert found["handover_p50_s"] is None


def test_a_minute_without_requests_has_no_figures() -> None:
    kept = Recent()
    now = time.monotonic() + 1000
    end(kept, now - 61, status=500)
    found = kept.last_minute(now)
    assert (found["requests"], found["requests_per_s"], found["failures"]) == (0, None, None)
    assert (found["first_token_p50_s"], found["first_token_p95_s"], found["handover_p50_s"]) == (None, None, None)


def test_the_minute_of_a_young_or_a_busy_proxy_is_shorter() -> None:
    kept = Recent()
    now = time.monotonic()
    for _ in range(4):
        end(kept, now)
    assert kept.last_minute(now + 8)["requests_per_s"] == pytest.approx(4 / 8, rel=0.05)
    now += 1000
    for n in range(2 * MAX_COUNTED):
        end(kept, now + n / 1000)
    found = kept.last_minute(now + 2 * MAX_COUNTED / 1000)
    assert (found["requests"], found["streams"]) == (MAX_COUNTED, MAX_COUNTED)
    assert found["window_s"] == pytest.approx(MAX_COUNTED / 1000)
    assert found["requests_per_s"] == pytest.approx(1000)


async def streams(_: Received, wire: Wire) -> None:
    await wire.head()
    await wire.chunk(b'data: {"choices": [{"text": " a"}]}\n\n')
    await wire.end()


def test_the_figures_are_those_of_the_requests_that_are_shown(proxy: Proxy, p: FakeServer, d: FakeServer) -> None:
    assert state(proxy)["last_minute"]["requests_per_s"] is None
    p.script = prefills_by_name
    proxy.complete()  # in one piece: no time to first token
    d.script = streams
    for _ in range(2):
        proxy.complete(stream=True)
    d.script = answers(500, b"{}")
    proxy.complete(stream=True)
    until(lambda: len(state(proxy)["ended"]) == 4)
    shown = state(proxy)
    first, second = shown["ended"][1:3]
    found = shown["last_minute"]
    assert (found["requests"], found["streams"], found["failures"]) == (4, 2, 1)
    assert found["requests_per_s"] == pytest.approx(4 / found["window_s"])
    lowest, highest = sorted([first["first_byte"], second["first_byte"]])
    assert found["first_token_p50_s"] == pytest.approx(lowest)
    assert found["first_token_p95_s"] == pytest.approx(highest)
    handovers = [max(0.0, one["first_byte"] - one["prefill_ended"]) for one in (first, second)]
    assert found["handover_p50_s"] == pytest.approx(min(handovers), abs=1e-6)
