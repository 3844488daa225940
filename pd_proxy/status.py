"""The page ``/status``, and the events that keep it live. The page itself is ``status.html``."""

import asyncio
import base64
import hashlib
import json
import math
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from http import HTTPStatus
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pd_proxy.control import ControlAddresses
from pd_proxy.error_answers import error_response
from pd_proxy.recent import KEPT_S, MAX_ENDED, Recent
from pd_proxy.servers import Server, Servers

#: How often a page that is open hears of changes.
_INTERVAL_S = 1.0
#: How many pages may be open at a time.
MAX_PAGES = 16
#: After that a page has to come back, as browsers do by themselves: an open page must not hold up the proxy's end.
_CONNECTION_S = 10.0


class StatusPage:
    """Shows servers and recent requests to whoever opens the page."""

    def __init__(self, legs: Sequence[Servers], control: ControlAddresses, recent: Recent) -> None:
        self._legs = legs
        self._control = control
        self._recent = recent
        self._pages = 0
        self._run = uuid.uuid4().hex[:8]  # a page may outlive the proxy that it came from
        self._html = files("pd_proxy").joinpath("status.html").read_text(encoding="utf-8")
        self._headers = {
            "cache-control": "no-store",
            "content-security-policy": _policy(self._html),
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }

    @property
    def routes(self) -> list[Route]:
        """The page and its events."""
        return [Route("/status", self._page), Route("/status/events", self._events)]

    async def _page(self, _: Request) -> Response:
        return HTMLResponse(self._html, headers=self._headers)

    async def _events(self, request: Request) -> Response:
        if self._pages >= MAX_PAGES:
            told = f"{self._pages} status pages are open, as many as this proxy keeps up to date: close one"
            return error_response(HTTPStatus.SERVICE_UNAVAILABLE, told)
        run, _, seen = request.headers.get("last-event-id", "").partition("-")
        place = int(seen) if run == self._run and re.fullmatch(r"[0-9]{1,15}", seen) else 0
        self._pages += 1  # before anything is awaited, or a crowd that comes at once is let through
        return _Events(self._news(place), self._closed)

    def _closed(self) -> None:
        self._pages -= 1

    async def _news(self, place: int) -> AsyncIterator[str]:
        yield "retry: 500\n\n"
        until = time.monotonic() + _CONNECTION_S
        while time.monotonic() < until:
            state, place = self._state(place)
            yield f"id: {self._run}-{place}\ndata: {json.dumps(state, separators=(',', ':'))}\n\n"
            await asyncio.sleep(_INTERVAL_S)

    def _state(self, place: int) -> tuple[dict[str, Any], int]:
        """Return what a page is to show that has seen the requests up to ``place`` end, and the new place."""
        ended = self._recent.ended_after(place)
        state = {
            "now": time.time(),
            "from_start": place == 0,
            "kept_s": KEPT_S,
            "max_ended": MAX_ENDED,
            "last_minute": self._recent.last_minute(time.monotonic()),
            "choices": [asdict(choice) | {"count": count} for choice, count in self._recent.choices()],
            "servers": [one for servers in self._legs for one in self._servers(servers)],
            "under_way_count": self._recent.count_under_way(),
            "under_way": self._recent.under_way(),
            "ended": ended,
        }
        return state, ended[-1]["place"] if ended else place

    def _servers(self, servers: Servers) -> list[dict[str, Any]]:
        return [
            {
                "leg": servers.leg,
                "url": one.url,
                "in_flight": one.in_flight,
                "state": _state_of(one),
                "control": ", ".join(map(str, self._control.of(one))),  # shown for prefill servers
            }
            for one in servers.members
        ]


def _state_of(server: Server) -> str:
    """Return what the operator or the proxy's last requests have told of a server, in a word for the page."""
    if server.is_leaving:
        return "leaving"
    if not server.last_chosen:
        return "unknown"
    if not server.skip_until:
        return "serves"
    return "refused" if time.monotonic() < server.skip_until < math.inf else "unsure"


class _Events(StreamingResponse):
    """A stream of events that tells its end, also where it never began because its client had left."""

    def __init__(self, news: AsyncIterator[str], ended: Callable[[], None]) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(news, media_type="text/event-stream", headers=headers)
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream to its end."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()


def _policy(html: str) -> str:
    """Return a policy under which the page's own script and style run, and nothing else."""

    def hashed(tag: str) -> str:
        inside = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in inside)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashed('script')}; style-src {hashed('style')}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
