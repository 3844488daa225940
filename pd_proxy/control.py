"""Where the prefill servers' control channels are, as their answers have told, and which Ds could not use that. No I/O.

A decode server that gets its leg together with the prefill server's must be told where to ask for the transfer. The
proxy is not configured with that: the first answer of each prefill server names it, and every later one confirms it.
Behind one URL may be several engines, each with an address of its own: of vLLM's data-parallel ranks, a request can
name the one that is to compute it.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pd_proxy.servers import Server

logger = logging.getLogger(__name__)

#: A key in the answers of those connectors that let a transfer be followed by its name. Others name a host and a port
#: too, and could do nothing with a name.
_MARK = "remote_attempt"

#: How long the legs of a decode server go in turn that has failed at once, and not in turn.
_IN_TURN_S = 300.0
#: For which one control address must be told alone to be that of a single engine.
_ONE_S = 300.0
#: A rank that no server has: vLLM's refusal tells how many there are. How long that number is believed, and after how
#: long another request asks if the one that asked was told none.
NO_RANK, _RANKS_S, _ASK_AGAIN_S = 65535, 300.0, 30.0
#: How long a rank is tried last whose address did not serve: if it has died, vLLM ends all of the server within 8 s.
_SKIP_S = 10.0


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port, as they are written together."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(slots=True, eq=False)
class Engine:
    """Who computes a prefill leg: a data-parallel rank of a server or, without one, whichever engine it chooses."""

    server: Server
    rank: int | None = None  # that the request names
    in_flight: int = 0  # prefill legs
    last_chosen: float = 0.0  # monotonic seconds; breaks ties in turn. In the future while it is tried last
    now: Address | None = None  # as last told
    before: set[Address] = field(default_factory=set)  # that have been replaced
    several: bool = False  # one that had been replaced came back
    since: float = 0.0  # when the address was another the last time
    ranks: "list[Engine]" = field(default_factory=list)  # of the server, if this is the whole of several
    counted_until: float = 0.0  # monotonic seconds

    @property
    def address(self) -> Address | None:
        """The control address; None if it is not known, or not one."""
        return None if self.several or self.ranks else self.now

    def __str__(self) -> str:
        return self.server.url if self.rank is None else f"{self.server.url} rank {self.rank}"


class ControlAddresses:
    """The control addresses of all prefill servers' engines.

    A server whose answers name several addresses in turn is more than one engine behind one URL, and nobody can say
    which of them will take a request. If they are vLLM's data-parallel ranks, requests name their rank from then on,
    and each rank has its address. Others, such as independent servers behind a load balancer, have none here. Where one
    address alone has been told for a while, it was a server that has restarted, and got a port of before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know none. ``clock`` is a monotonic clock, in seconds."""
        self._clock = clock
        self._wholes: dict[str, Engine] = {}  # by URL
        self._cutting: set[str] = set()  # servers that have left the last token of their last prompt to D
        self._doubted: set[str] = set()  # servers whose last answer told nothing

    @property
    def prompts_are_cut(self) -> bool:
        """Whether a server leaves the last token of prompts to D, as one does whose model has states."""
        return bool(self._cutting)

    def of(self, server: Server) -> list[Address]:
        """Return those addresses of a server that are known: that of its one engine, or of its ranks."""
        whole = self._whole(server)
        return [address for each in (whole, *whole.ranks) if (address := each.address)]

    def choose(self, server: Server, *, by_rank: bool) -> Engine:
        """Return who gets the next request to a server. ``by_rank``: the request can name a rank, and gains by it."""
        whole, now = self._whole(server), self._clock()
        if not by_rank or not (whole.several or whole.ranks):
            return whole
        if now >= whole.counted_until:
            whole.counted_until = now + _ASK_AGAIN_S
            return Engine(server, NO_RANK)
        chosen = min(whole.ranks, key=lambda it: (it.last_chosen > now, it.in_flight, it.last_chosen), default=whole)
        chosen.last_chosen = now
        return chosen

    def count(self, server: Server, number: int) -> Engine:
        """Note how many ranks a server has, as it says where a request names another; return who gets that request."""
        whole, number = self._whole(server), number if number > 1 else 0
        if number != len(whole.ranks):
            logger.info("prefill server %s has %d data-parallel ranks to choose from", whole, number)
        whole.counted_until = self._clock() + _RANKS_S
        whole.ranks = whole.ranks[:number] + [Engine(server, rank) for rank in range(len(whole.ranks), number)]
        return whole

    def learn(self, engine: Engine, transfer: dict[str, Any]) -> None:
        """Note the address in the ``kv_transfer_params`` of an engine's answer, and whether the prompt is cut."""
        url, address = engine.server.url, address_in(transfer)
        (self._cutting.add if transfer.get("prompt_is_cut") is True else self._cutting.discard)(url)
        self._doubted.discard(url)
        if engine.rank == NO_RANK:  # the header chooses nothing there
            self.count(engine.server, 0)
        if address is None:
            self.forget(engine.server)
            return
        if address == engine.now:
            if self._clock() - engine.since >= _ONE_S:
                engine.before.clear()
                engine.several = False
            return
        engine.since, news = self._clock(), ""
        if address in engine.before and not engine.several:
            engine.several, news = True, "answers from several control addresses: its legs go in turn"
        elif engine.now is not None and not engine.several:
            engine.before.add(engine.now)
            news = f"has a new control address, {address}"
        if news and not engine.ranks:
            logger.info("prefill server %s %s", engine, news)
        engine.now = address

    def forget(self, server: Server, *, is_sure: bool = True) -> None:
        """Take a server for a new one. It could not be reached, or its address did not serve.

        ``is_sure``: if not, its answer told nothing, as if D did not need the transfer. Two in a row are enough.
        """
        if not is_sure and server.url not in self._doubted:
            self._doubted.add(server.url)
            return
        whole = self._whole(server)
        for each in (whole, *whole.ranks):
            each.now, each.before, each.several = None, set(), False
        self._cutting.discard(server.url)

    def fail(self, engine: Engine) -> None:
        """Note that the address of an engine may be what a decode server could not use: it has moved, or has died."""
        engine.last_chosen = self._clock() + _SKIP_S
        self.forget(engine.server)

    def _whole(self, server: Server) -> Engine:
        return self._wholes.get(server.url) or self._wholes.setdefault(server.url, Engine(server))


class CircuitBreaker:
    """The decode servers that seem unable to follow a transfer by its name.

    Nothing that a decode server answers says whether its connector can, or what else was the matter. One that fails a
    request with both legs at once gets its next one from the same prefill server in turn. If it serves that, at the
    same address, it may have been replaced meanwhile, so both legs are sent at once again. If that happens a second
    time, all its legs go in turn for a while. It is then tried again, because something else may have been the reason.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Trust every server. ``clock`` is a monotonic clock, in seconds."""
        self._clock = clock
        # By decode and prefill server, a request's id and where it was to follow it, if the decode server failed it
        self._failed: dict[tuple[str, str], tuple[str, Address]] = {}  # with both legs at once, the last time
        self._before: dict[tuple[str, str], str] = {}  # a time before, and then served one in turn
        self._until: dict[str, float] = {}  # by decode server

    def failed_at_once(self, decode: str, prefill: str, address: Address, request_id: str) -> None:
        """Note that a decode server failed a request that it was to follow at this address."""
        self._failed[decode, prefill] = request_id, address

    def served_at_once(self, decode: str, prefill: str) -> None:
        """Note that it served one that way: it can."""
        self._failed.pop((decode, prefill), None)
        self._before.pop((decode, prefill), None)

    def served_in_turn(self, decode: str, prefill: str, address: Address | None) -> None:
        """Note that it served one from a prefill server whose answers name this address."""
        failed, at = self._failed.pop((decode, prefill), ("", None))
        if not at or at != address:
            return
        if (before := self._before.pop((decode, prefill), None)) is None:
            self._before[decode, prefill] = failed
            logger.info(
                "decode server %s failed request %s with both legs at once and has served one in turn since, as one "
                "does that was replaced: both legs go at once again. Its log says under that id what was the matter",
                decode, failed,
            )  # fmt: skip
            return
        self._until[decode] = self._clock() + _IN_TURN_S
        logger.warning(
            "decode server %s failed requests %s and %s with both legs at once and served one in turn after each: its "
            "legs go in turn for %g s. Either its connector cannot follow transfers by name, so give all servers the "
            "same version, or its log says with these requests' ids what is the matter",
            decode, before, failed, _IN_TURN_S,
        )  # fmt: skip

    def go_in_turn(self, decode: str, prefill: str) -> bool:
        """Return whether the legs of a request to these servers are to go in turn."""
        return (decode, prefill) in self._failed or self._until.get(decode, 0.0) > self._clock()


def address_in(transfer: dict[str, Any]) -> Address | None:
    """Return the control address in a server's ``kv_transfer_params``; None if it is none, or another connector's."""
    host, port = transfer.get("remote_host"), transfer.get("remote_port")
    if _MARK not in transfer or not isinstance(host, str) or not host:
        return None
    if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
        return None
    return Address(host, port)
