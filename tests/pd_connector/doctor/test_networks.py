"""Networks that users have, with P and D on hosts of their own: it works, or what does not is said in time.

The doctors pull by the prefill and decode engines' own classes, over real sockets in network namespaces.
"""

import re
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks.hosts import THIS_MACHINE
from tests.support.connector.doctors import NONE, Doctors, Visit
from tests.support.e2e.forwarder import Forwarder
from tests.support.e2e.hosts import Hosts, why_not
from tests.support.waiting import until
from transfer.peers import parse_address

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.thorough,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.timeout(600),
]
P, D, ROUTER = 1, 2, 3
CONTROL, DATA = "9876", "15000-17000"
ELSEWHERE = "10.98.0.1"  # an address of P at a cable that does not lead to D
ELSEWHERE_TOO = "10.98.1.1"  # at a cable that does
NO_ANSWER = "there is no connection, for 3.75 s: "
#: docs/reliability.md: 10 s at first contact, and what else a busy machine takes.
FAILS_WITHIN_S = 40.0
CUT_FAILS_WITHIN_S = 6.0  # 5 s, once P has been met


@pytest.fixture(scope="module")
def doctors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doctors]:
    with closing(Doctors(tmp_path_factory.mktemp("doctors"))) as doctors:
        yield doctors


@dataclass
class Network:
    """Hosts for P and D, which a test configures before the doctors come."""

    hosts: Hosts
    doctors: Doctors

    def visit(
        self,
        p: Mapping[str, Any] | None = None,
        d: Mapping[str, Any] | None = None,
        *,
        names: str = "",
        by_router: bool = False,
        variables: Mapping[str, str] = NONE,
    ) -> Visit:
        """What D's doctor says of P's, given their settings, and variables of P's environment.

        ``by_router``: at an HTTP port of this machine, which reaches P wherever it is, as a router or an ingress does.
        """
        with ExitStack() as stack:
            address = stack.enter_context(self.doctors.listening(self.hosts, P, names, variables, **(p or {})))
            if by_router:
                to = parse_address(address)
                here = Hosts.address(THIS_MACHINE)
                port = stack.enter_context(closing(Forwarder(to.host, to.port, listens_at=here))).port
                address = f"{here}:{port}"
            return self.doctors.visit(self.hosts, D, address, names, **(d or {}))

    def refusal(self, **config: Any) -> str:
        """Why P's doctor does not listen."""
        with self.doctors.listening(self.hosts, P, **config) as said:
            return said

    def fails(self, check: str, *said: str, **options: Any) -> None:
        """D's doctor finds that in time, and says so."""
        found = self.visit(**options)
        assert found.failure.startswith(f"FAIL {check}: "), found.text
        for words in said:
            assert re.search(words, found.failure), found.failure
        assert found.seconds < FAILS_WITHIN_S


@pytest.fixture
def network(doctors: Doctors) -> Iterator[Network]:
    with closing(Hosts()) as hosts:
        for number in (P, D):
            hosts.namespace(number)
        yield Network(hosts, doctors)


def pulls(found: Visit) -> bool:
    assert found.has_pulled, found.text
    return True


@pytest.mark.slow
def test_each_at_its_own_address(network: Network) -> None:
    assert pulls(network.visit())


def test_no_default_route(network: Network) -> None:
    """vLLM finds no address by itself, on neither side."""
    for number in (P, D):
        network.hosts.configure(number, "route del default")
    said = network.refusal()
    why = "all addresses; also vLLM's choice where there is no default route"
    assert f"cannot listen: host = '0.0.0.0' ({why}) is not an address" in said
    assert "Set it to one of this machine's network interfaces" in said
    p, d = ({"host": Hosts.address(number)} for number in (P, D))
    network.fails("peer: pull", "host '0.0.0.0' .*: set host, .* Without a default route, vLLM finds none", p=p)
    assert pulls(network.visit(p, d))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["", "host", "VLLM_HOST_IP"], ids=["unset", "host", "variable"])
def test_several_interfaces_of_which_that_of_the_default_route_does_not_lead_to_d(network: Network, which: str) -> None:
    hosts = network.hosts
    hosts.join(P, D, "eth1")
    for number in (P, D):
        hosts.configure(number, f"address add 10.98.1.{number}/24 dev eth1")
    with hosts.parted(P, D):
        if which == "host":
            assert pulls(network.visit({which: ELSEWHERE_TOO}))
        elif which:
            assert pulls(network.visit(variables={which: ELSEWHERE_TOO}))
        else:
            network.fails("peer: handshake", re.escape(Hosts.address(P)), NO_ANSWER, "setting host", by_router=True)


def test_names_instead_of_addresses(network: Network) -> None:
    names = f"{Hosts.address(P)} p.example\n{Hosts.address(D)} d.example"
    assert pulls(network.visit({"host": "p.example"}, {"host": "d.example"}, names=names))


@pytest.mark.parametrize("is_set", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["unset", "set"])
def test_ipv6_only(network: Network, is_set: bool) -> None:
    for number in (P, D):
        network.hosts.give_ipv6(number)
        network.hosts.configure(number, "-4 address flush dev eth0")
    p, d = ({"host": Hosts.ipv6(number)} if is_set else {} for number in (P, D))
    assert pulls(network.visit(p, d))


@pytest.mark.slow
@pytest.mark.parametrize("host_of", [P, D])
def test_an_ipv6_address_of_one_side_where_both_have_both(network: Network, host_of: int) -> None:
    for number in (P, D):
        network.hosts.give_ipv6(number)
    p, d = ({"host": Hosts.ipv6(number)} if number == host_of else {} for number in (P, D))
    assert pulls(network.visit(p, d))


@pytest.mark.parametrize(
    "by_router", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["direct", "by a router"]
)
def test_families_that_differ(network: Network, by_router: bool) -> None:
    network.hosts.give_ipv6(P)
    network.hosts.configure(P, "-4 address flush dev eth0")
    said = (f"no route to {Hosts.ipv6(P)} .IPv6., as its own addresses are IPv4 only", "let the setting host name")
    network.fails("peer: handshake" if by_router else "peer", *said, by_router=by_router)


@pytest.mark.slow
def test_an_address_that_is_translated_to_p(network: Network) -> None:
    """NAT, one to one: P cannot take it for its own, and its own leads nowhere from D."""
    said = network.refusal(host="203.0.113.7")
    assert "cannot listen: host = '203.0.113.7' is not an address of this machine" in said
    assert "translated to this machine (NAT) is not supported, even one to one" in said
    network.hosts.join(P, ROUTER, "eth1")
    network.hosts.configure(P, f"address add {ELSEWHERE}/24 dev eth1")
    network.hosts.lead(ELSEWHERE, P)
    network.fails("peer: handshake", f"{ELSEWHERE}:\\d+", NO_ANSWER, "NAT", p={"host": ELSEWHERE}, by_router=True)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["prohibit", "blackhole"])
def test_a_closed_control_port(network: Network, how: str) -> None:
    network.hosts.close_ports(P, CONTROL, how)
    network.fails(
        "peer: handshake", f"{Hosts.address(P)}:{CONTROL}", NO_ANSWER, "port closed", p={"port": int(CONTROL)}
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", ["prohibit", "blackhole"])
def test_closed_data_ports(network: Network, how: str) -> None:
    network.hosts.close_ports(P, DATA, how)
    why = "No route to host" if how == "prohibit" else "nothing comes back, as where a firewall drops packets"
    network.fails("peer: pull", rf"its port \d+ takes no connection \({why}\)", "two, each from 15000 to 17000")


@pytest.mark.slow
def test_a_network_that_is_cut_at_the_first_read(network: Network) -> None:
    """D connects to P's data port, which is not answered, until nothing is."""
    network.hosts.close_ports(P, DATA, "blackhole")
    for _ in range(3):
        with ThreadPoolExecutor(1) as threads:
            visit = threads.submit(network.visit)
            until(lambda: connects_to_data(network.hosts), within_s=60.0)
            with network.hosts.unplugged(P):
                found = visit.result()
        if "cannot reach the transfer engine" not in found.failure:  # Mooncake gives up by itself after 5 s
            break
    said = re.match(
        r"FAIL peer: pull: unreachable: .* \(([\d.]+) s\): its engine was given up: .* for 3\.75 s", found.failure
    )
    assert said, found.text
    assert float(said[1]) < CUT_FAILS_WITHIN_S


@pytest.mark.slow
@pytest.mark.parametrize("where", ["on P's interface", "on the way"])
def test_a_small_mtu(network: Network, where: str) -> None:
    if where == "on the way":
        assert pulls(network.visit({"host": behind_a_router(network.hosts)}))
    else:
        for number in (P, D):
            network.hosts.configure(number, "link set eth0 mtu 1280")
        assert pulls(network.visit())


@pytest.mark.slow
def test_a_small_mtu_on_the_way_of_which_p_is_not_told(network: Network) -> None:
    """A firewall eats the router's words, so what is large never arrives."""
    host = behind_a_router(network.hosts)
    local = ("rule add pref 20 lookup local", "rule del pref 0")
    network.hosts.configure(P, *local, "rule add pref 10 iif eth1 ipproto icmp blackhole")
    network.fails("peer: pull", "does the way lose large packets", p={"host": host})


def connects_to_data(hosts: Hosts) -> bool:
    """Whether a connection from D to one of P's data ports has no answer yet."""
    shown = subprocess.run([*hosts.prefix(D), "cat", "/proc/net/tcp"], capture_output=True, text=True, check=True)
    first, last = map(int, DATA.split("-"))
    asked = re.findall(r"^ *\d+: \S+ \w+:(\w{4}) 02 ", shown.stdout, re.MULTILINE)  # SYN_SENT
    return any(first <= int(port, 16) <= last for port in asked)


def behind_a_router(hosts: Hosts) -> str:
    """Put P and D behind a router with a small MTU towards D, and return P's address there."""
    for number, mtu in ((P, 1500), (D, 1280)):
        network, device = f"10.97.{number}", f"eth{number}"
        hosts.join(number, ROUTER, device)
        hosts.configure(ROUTER, f"address add {network}.254/24 dev {device}", f"link set {device} mtu {mtu}")
        hosts.configure(number, f"address add {network}.1/24 dev {device}", f"route add 10.97.0.0/16 via {network}.254")
    hosts.forward(ROUTER)
    return "10.97.1.1"
