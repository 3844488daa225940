"""The connectors that are compared, and what differs between them.

What a router must send with each leg is each connector's own contract: ``Contract`` makes it of what P has answered,
or of the transfer's name where both legs are sent at once.
"""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

from benchmarks.peers import counters

HOST = "127.0.0.1"
TRANSFERS = "PD_BENCHMARK_TRANSFERS"  # the environment variable that names the file of ``mooncake_on_cpu``
Legs = Literal["in turn", "together"]
Params = dict[str, Any]


@dataclass(frozen=True)
class Ports:
    """Of one pair of servers, beside those of HTTP, and the addresses of their hosts."""

    prefill: int
    decode: int
    prefill_host: str = HOST
    decode_host: str = HOST

    def of(self, prefill: bool) -> tuple[str, int]:
        """Return one server's host and port."""
        return (self.prefill_host, self.prefill) if prefill else (self.decode_host, self.decode)


@dataclass
class Pair:
    """A prefill and a decode server of one connector, as a router knows them."""

    prefill_url: str
    decode_url: str
    ports: Ports
    transfers: Path  # where the Mooncake connector records them
    learnt: Params = field(default_factory=dict)  # what a router has asked P, or P has answered


@dataclass(frozen=True)
class Contract:
    """What a router sends: for the prefill leg, and for the decode leg when P has answered, or at once."""

    for_prefill: Params
    for_decode: Params | None  # None: what P answers


@dataclass(frozen=True)
class Connector:
    """One of the compared."""

    key: str
    label: str
    class_name: str
    module: str | None
    options: Mapping[str, object]
    environment: Callable[[Ports, bool], dict[str, str]]  # True: of the prefill server
    legs: tuple[Legs, ...]
    contract: Callable[[Pair, Legs], Contract]
    counted: Callable[[Pair], counters.Moved]

    def transfer_config(self, role: str) -> Params:
        """Return vLLM's ``--kv-transfer-config``. Failed loads fail the request, as by default."""
        config: Params = {
            "kv_connector": self.class_name, "kv_role": role, "kv_connector_extra_config": dict(self.options)
        }  # fmt: skip
        return config | ({"kv_connector_module_path": self.module} if self.module else {})


def _our_environment(ports: Ports, prefill: bool) -> dict[str, str]:
    return {"VLLM_HOST_IP": ports.of(prefill)[0]}


def _ours(pair: Pair, legs: Legs) -> Contract:
    if legs == "in turn":
        return Contract({"do_remote_decode": True}, None)
    name = {"transfer_id": uuid.uuid4().hex}
    control = {key: pair.learnt[key] for key in ("remote_host", "remote_port")}
    return Contract({"do_remote_decode": True} | name, {"do_remote_prefill": True} | name | control)


def _mooncake(pair: Pair, _legs: Legs) -> Contract:
    """As vLLM's own proxy for it does: it asks P's bootstrap server who P is, and names the transfer."""
    bootstrap = f"http://{pair.ports.prefill_host}:{pair.ports.prefill}"
    if not pair.learnt:
        pair.learnt["engine_id"] = httpx.get(f"{bootstrap}/query", trust_env=False).json()["0"]["engine_id"]
    name = {"transfer_id": uuid.uuid4().hex}
    for_decode = {"do_remote_decode": False, "do_remote_prefill": True, "remote_bootstrap_addr": bootstrap,
                  "remote_engine_id": pair.learnt["engine_id"]}  # fmt: skip
    return Contract({"do_remote_decode": True, "do_remote_prefill": False} | name, for_decode | name)


def _mooncake_environment(ports: Ports, prefill: bool) -> dict[str, str]:
    host, port = ports.of(prefill)
    return {"VLLM_HOST_IP": host, "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port)}


def _nixl(_pair: Pair, _legs: Legs) -> Contract:
    unknown = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    return Contract({"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(unknown), None)


def _nixl_environment(ports: Ports, prefill: bool) -> dict[str, str]:
    # TCP for all: UCX would read the other process's memory through the kernel, which two machines cannot.
    host, port = ports.of(prefill)
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "UCX_TLS": "tcp", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}


OURS = Connector(
    "ours", "pd-connector", "PDConnector", "pd_connector", {}, _our_environment,
    ("in turn", "together"), _ours, lambda pair: counters.ours(pair.decode_url),
)  # fmt: skip
MOONCAKE = Connector(
    "mooncake", "vLLM's MooncakeConnector", "MooncakeConnector", "benchmarks.peers.mooncake_on_cpu",
    {"mooncake_protocol": "tcp"}, _mooncake_environment, ("in turn", "together"), _mooncake,
    lambda pair: counters.mooncake(pair.transfers),
)  # fmt: skip
NIXL = Connector(
    "nixl", "vLLM's NixlConnector", "NixlConnector", None, {}, _nixl_environment, ("in turn",), _nixl,
    lambda pair: counters.nixl(pair.decode_url),
)  # fmt: skip
ALL = (OURS, MOONCAKE, NIXL)
