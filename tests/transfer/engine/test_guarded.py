"""A guarded engine opens links to allowed hosts only; everything else it passes on."""

from collections.abc import Sequence
from typing import NoReturn

import pytest

from layout.geometry import Region
from transfer.engine.base import ReadFailed
from transfer.engine.guarded import GuardedEngine
from transfer.engine.in_process import InProcessEngine, InProcessFabric
from transfer.peers import AllowedPeers


class Opened(Exception):  # noqa: N818
    """The engine behind the guard was asked to open an address."""


class Behind(InProcessEngine):
    def open(self, address: str, regions: Sequence[Region]) -> NoReturn:
        raise Opened(address)


def guarded(rules: list[str] | None) -> GuardedEngine:
    return GuardedEngine(Behind(InProcessFabric()), AllowedPeers(rules))


@pytest.mark.parametrize("address", ["10.0.0.5:15000", "[fd00::1]:15000", "p.internal:15000", "P.internal:1"])
def test_an_allowed_address_is_passed_on(address: str) -> None:
    with pytest.raises(Opened, match=address.replace("[", r"\[")):
        guarded(["10.0.0.0/8", "fd00::/8", "p.internal"]).open(address, ())


@pytest.mark.parametrize("address", ["10.0.0.5:15000", "in-process:1", "anything"])
def test_without_rules_every_address_is_passed_on(address: str) -> None:
    with pytest.raises(Opened, match=address):
        guarded(None).open(address, ())


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("192.0.2.1:15000", "192.0.2.1 may not be contacted: allowed_peers names 10.0.0.0/8, p.internal"),
        ("[::1]:15000", "::1 may not be contacted"),
        ("evil.example:15000", "'evil.example' is neither an IP address nor a host name of allowed_peers"),
        ("10.0.0.5", "'' is neither"),
        ("", "'' is neither"),
    ],
)
def test_any_other_is_refused_before_the_engine_behind_hears_of_it(address: str, words: str) -> None:
    with pytest.raises(ReadFailed) as refusal:
        guarded(["10.0.0.0/8", "p.internal"]).open(address, ())
    assert words in str(refusal.value)
    assert refusal.value.settled


def test_the_address_and_the_memory_are_those_of_the_engine_behind() -> None:
    behind = InProcessEngine(InProcessFabric())
    engine = GuardedEngine(behind, AllowedPeers())
    assert engine.address == behind.address
    engine.close()
