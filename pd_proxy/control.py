"""Where the prefill servers' control channels are, as their answers have told, and which Ds could not use that. No I/O.

A decode server that gets its leg together with the prefill server's must be told where to ask for the transfer. The
proxy is not configured with that: the first answer of each prefill server names it, and every later one confirms it.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

#: A key in the answers of those connectors that let a transfer be followed by its name. Others name a host and a port
#: too, and could do nothing with a name.
_MARK = "remote_attempt"

#: How long the legs of a decode server go in turn that has failed at once, and not in turn.
_IN_TURN_S = 300.0
#: For which one control address must be told alone to be that of a single engine.
_ONE_S = 300.0


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port, as they are written together."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(slots=True)
class _Told:
    now: Address | None = None  # as last told
    before: set[Address] = field(default_factory=set)  # that have been replaced
    several: bool = False  # one that had been replaced came back
    since: float = 0.0  # when the address was another the last time


class ControlAddresses:
    """The control addresses of all prefill servers, by their URLs.

    A server whose answers name several addresses in turn is more than one engine behind one URL, such as the ranks of a
    data-parallel deployment. It has no address here, because nobody can say which of them will take a request. Where
    one address alone has been told for a while, it was a server that has restarted, and got a port of before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Know none. ``clock`` is a monotonic clock, in seconds."""
        self._clock = clock
        self._told: dict[str, _Told] = {}
        self._cutting: set[str] = set()  # servers that have left the last token of their last prompt to D
        self._doubted: set[str] = set()  # servers whose last answer told nothing

    @property
    def prompts_are_cut(self) -> bool:
        """Whether a server leaves the last token of prompts to D, as one does whose model has states."""
        return bool(self._cutting)

    def of(self, url: str) -> Address | None:
        """Return a server's control address; None if it is not known, or not one."""
        told = self._told.get(url)
        return None if told is None or told.several else told.now

    def learn(self, url: str, transfer: dict[str, Any]) -> None:
        """Note the address in the ``kv_transfer_params`` of a server's answer, and whether the prompt is cut."""
        (self._cutting.add if transfer.get("prompt_is_cut") is True else self._cutting.discard)(url)
        self._doubted.discard(url)
        address = address_in(transfer)
        if address is None:
            self.forget(url)
            return
        told = self._told.setdefault(url, _Told())
        if address == told.now:
            if self._clock() - told.since >= _ONE_S:
                told.before.clear()
                told.several = False
            return
        told.since = self._clock()
        if address in told.before and not told.several:
            told.several = True
            logger.info("prefill server %s answers from several control addresses: its legs go in turn", url)
        elif told.now is not None and not told.several:
            told.before.add(told.now)
            logger.info("prefill server %s has a new control address, %s", url, address)
        told.now = address

    def forget(self, url: str, *, is_sure: bool = True) -> None:
        """Take a server for a new one. It could not be reached, or its address did not serve.

        ``is_sure``: if not, its answer told nothing, as if D did not need the transfer. Two in a row are enough.
        """
        if not is_sure and url not in self._doubted:
            self._doubted.add(url)
            return
        self._told.pop(url, None)
        self._cutting.discard(url)


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
