"""Engines of different address families, each in a process of its own: Mooncake decides once a process.

Covers: transfer.engine.mooncake_native.
"""

import json
import socket
import subprocess
import sys
from contextlib import suppress
from unittest.mock import patch

import pytest

from layout.geometry import Identity, Region
from tests.support.engine.peer_process import PeerProcess, environment_with
from tests.support.memory import Memory, even_copies, noise
from tests.support.waiting import WAIT_S
from transfer.engine import mooncake_native
from transfer.engine.interface import ReadFailed
from transfer.engine.mooncake import MooncakeEngine, MooncakeOptions

pytestmark = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no sockets for both families here")

SIZE, SEED = 1 << 20, 1
IPV4, IPV6 = "127.0.0.1", "::1"


def read_in_a_process(
    host: str, ipv6: str | None, peer: PeerProcess, *, own_engine: bool = True, elsewhere: str = ""
) -> str:
    """Why the peer's memory cannot be read by an engine at ``host``, empty if it was.

    ``elsewhere``: the address, of nobody, that the peer's name has when the engine looks for it the first time.
    """
    what = {
        "host": host, "own_engine": own_engine, "elsewhere": elsewhere, "address": peer.address,
        "start": peer.region.address, "identity": peer.identity.address, "nonce": peer.identity.nonce.hex(),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps(what)],
        env=environment_with(ipv6), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=4 * WAIT_S,
        check=True,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "own_engine", [pytest.param(True, marks=pytest.mark.slow), False], ids=["an engine a link", "one engine"]
)
@pytest.mark.parametrize(
    ("reader", "reads_ipv6", "peer", "serves_ipv6"),
    [
        (IPV4, "1", IPV6, None),
        (IPV6, None, IPV4, "0"),
        pytest.param(IPV6, None, IPV4, "1", marks=pytest.mark.slow),
        (IPV4, "1", IPV4, "0"),
        pytest.param(IPV4, "0", IPV4, "1", marks=pytest.mark.slow),
        pytest.param(IPV6, None, IPV6, None, marks=pytest.mark.slow),
        (IPV4, "1", "localhost", "0"),
    ],
)
def test_engines_of_any_two_families_reach_each_other(
    reader: str, reads_ipv6: str | None, peer: str, serves_ipv6: str | None, own_engine: bool
) -> None:
    with PeerProcess(SIZE, SEED, host=peer, ipv6=serves_ipv6) as process:
        assert read_in_a_process(reader, reads_ipv6, process, own_engine=own_engine) == ""


@pytest.mark.thorough
def test_a_peer_that_comes_back_at_another_address_is_found_by_its_name() -> None:
    with PeerProcess(SIZE, SEED, host="localhost", ipv6="0") as process:
        assert read_in_a_process(IPV4, "1", process, own_engine=False, elsewhere="255.255.255.255") == ""


@pytest.mark.thorough
def test_a_host_name_is_said_to_be_of_no_family() -> None:
    with PeerProcess(SIZE, SEED, host="localhost") as process:
        process.kill()
        why = read_in_a_process(IPV6, None, process)
    assert f"cannot reach the transfer engine at {process.address}" in why
    assert "It announces" not in why


@pytest.mark.thorough
def test_an_engine_that_speaks_ipv4_only_refuses_an_ipv6_peer_by_name() -> None:
    with PeerProcess(SIZE, SEED, host=IPV6) as process:
        why = read_in_a_process(IPV4, "0", process)
    assert f"cannot open a link to {process.address}: that is an IPv6 address" in why
    assert "IPv4 only" in why
    assert "the host here is 127.0.0.1 (IPv4): let the setting host name addresses of one family" in why
    assert "firewall" not in why


def test_a_peer_of_the_other_family_that_does_not_answer_is_said_to_be_one() -> None:
    with PeerProcess(SIZE, SEED, host=IPV6) as process:
        process.kill()
        why = read_in_a_process(IPV4, "1", process)
    assert "It announces an address of IPv6, and the host here is 127.0.0.1 (IPv4)" in why


def main() -> None:
    """Read the peer's memory that the command line names; say why that is not possible."""
    what = json.loads(sys.argv[1])
    destination = Memory(SIZE)
    engine = MooncakeEngine(MooncakeOptions(what["host"], engine_per_link=what["own_engine"], connect_timeout_s=WAIT_S))
    engine.register([destination.region])
    source = Region(what["start"], SIZE)
    identity = Identity(what["identity"], bytes.fromhex(what["nonce"]))
    try:
        if what["elsewhere"]:
            with patch.object(mooncake_native, "resolve", return_value=what["elsewhere"]), suppress(ReadFailed):
                engine.open(what["address"], [source], identity)
                sys.exit("the peer is found where it is not")
        link = engine.open(what["address"], [source], identity)
        link.read(even_copies(destination.region, source, 16, SIZE // 16), WAIT_S)
        assert (destination.view == noise(SIZE, SEED)).all(), "other bytes have arrived"
    except ReadFailed as failure:
        sys.stdout.write(str(failure))
    engine.close()


if __name__ == "__main__":
    main()
