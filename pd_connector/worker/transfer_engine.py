"""The transfer engine of a worker, as the settings ask for it."""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from layout.cost import CostModel
from layout.geometry import Region
from pd_connector.config import ConfigError, ConnectorConfig
from pd_connector.engine_limits import ENGINE_LIMITS
from pd_connector.vllm.ascend_options import ASCEND_STORE
from pd_connector.vllm.devices import default_protocol, device_type
from pd_connector.vllm.npu.lent_engine import LendEngine, is_started, lent_engine
from pd_connector.vllm.platform import host_address
from pd_connector.worker.device_memory import DeviceIdentityMemory
from pd_connector.worker.same_host import with_second_way
from transfer.engine.ascend_environment import ascend_settings
from transfer.engine.interface import TransferEngine
from transfer.engine.mooncake import IDENTITY_BYTES, MooncakeEngine, MooncakeOptions
from transfer.engine.rdma import has_rdma_device
from transfer.memory import is_readable
from transfer.peers import is_own_address, loopback_of

logger = logging.getLogger(__name__)


def read_cost(config: ConnectorConfig) -> CostModel:
    """Return what reads cost: what is set, else what suits the protocol."""
    cost, tuning = CostModel.of_protocol(transport(config)), config.tuning
    if tuning.descriptor_cost_us is not None:
        cost = replace(cost, alpha=tuning.descriptor_cost_us * 1e-6)
    if tuning.byte_cost_ns is not None:
        cost = replace(cost, beta=tuning.byte_cost_ns * 1e-9)
    return cost


def transport(config: ConnectorConfig) -> str:
    """Return the protocol of the transfer engine: the setting, or what suits the platform and this machine.

    A device that is named is meant: without it, the engine does not start.
    """
    if config.protocol != "auto":
        return config.protocol
    suited = default_protocol()
    return "tcp" if suited == "rdma" and not (config.devices or has_rdma_device()) else suited


def goes_through_device(transport: str, device_type: str) -> bool:
    """Return whether the devices copy what is read, piece by piece, so that a prefill engine slows down meanwhile.

    Over TCP, Mooncake has CUDA copy 64 KiB at a time from and to pageable memory. With both sides on one GPU, a prefill
    took two to three times as long while it was read, and from 8,000 tokens on the first token came later than in turn.
    """
    return transport == "tcp" and device_type == "cuda"


def check_reaches(config: ConnectorConfig, regions: Sequence[Region]) -> None:
    """Raise unless the transport can read and write ``regions``, the memory of this worker's caches.

    Mooncake would register them and open links, and then every read would fail: without CUDA, its TCP transport gives
    the addresses to sockets.

    Raises:
        ConfigError: it cannot.
    """
    protocol = transport(config)
    if device_type() == "npu" and protocol == "tcp" and regions and not is_readable(regions[0].address):
        raise ConfigError(
            f"protocol = {protocol!r}: the CPU cannot read this NPU's memory, and Mooncake sends no other over TCP; "
            "leave protocol out on both sides, which then take ascend"
        )


def _own_host(config: ConnectorConfig) -> str:
    """Return the address at which peers reach this worker.

    Raises:
        ConfigError: it is not an address of this machine, so peers would read another's memory, or none.
    """
    host = config.host or host_address()
    if not is_own_address(host):
        source = "host" if config.host else "vLLM's own choice of host (VLLM_HOST_IP)"
        why = " (all addresses; also vLLM's choice where there is no default route)" if host == "0.0.0.0" else ""  # noqa: S104
        raise ConfigError(
            f"{source} = {host!r}{why} is not an address of this machine, but peers read this worker's memory there. "
            "Set it to one of this machine's network interfaces. If workers of this engine run on several machines, "
            "leave host unset and set VLLM_HOST_IP on each. An address that is translated to this machine (NAT) is not "
            "supported, even one to one; forwarded ports cannot work, as the system chooses the transfer engine's"
        )
    if loopback := loopback_of(host):
        logger.warning(
            "PDConnector: host = %r is %s on this machine (/etc/hosts), so it is reached from this machine only; for "
            "peers on others, set it to the address of a network interface", host, loopback,
        )  # fmt: skip
    return host


def lender(config: ConnectorConfig) -> LendEngine | None:
    """Return what lends this worker its engine, None if it has its own. Call it while the connector is made.

    Raises:
        ConfigError: peers would know the engine by another address than that of the setting.
        EngineStartError: a variable of HCCL's that is no number.
    """
    lend = lent_engine() if transport(config) == "ascend" else None
    if lend is not None and config.host not in (None, host_address()):
        raise ConfigError(
            f"host = {config.host!r}: the transfer engine is shared with {ASCEND_STORE}, which starts it at "
            f"{host_address()} (VLLM_HOST_IP, or that of the default route); leave host unset, and set VLLM_HOST_IP"
        )
    if lend is not None:  # its lender starts it when its own connector is made, or when caches are registered
        settings = ascend_settings(os.environ, ENGINE_LIMITS.handshake_timeout_s)
        if is_started() and (missing := [name for name in settings if name not in os.environ]):
            logger.warning(
                "PDConnector: %s has started the transfer engine without %s: name PDConnector first in MultiConnector, "
                "or set %s", ASCEND_STORE, ", ".join(missing),
                ", ".join(f"{name}={settings[name]}" for name in missing),
            )  # fmt: skip
        for name, value in settings.items():
            os.environ.setdefault(name, value)
    return lend


def _identity_memory(protocol: str) -> DeviceIdentityMemory | None:
    """Return what holds the numbers of a process that computes on a device; None for host memory."""
    if protocol == "ascend":  # over HCCS, peers cannot read host memory
        return DeviceIdentityMemory.on_npu(IDENTITY_BYTES)
    # Numbers are what Mooncake's threads copy first. Before a copy from or to a GPU, a thread chooses that GPU; if it
    # looks at host memory before, it takes a context on GPU 0, of half a gigabyte, whichever GPU the process uses.
    if goes_through_device(protocol, device_type()) and torch.cuda.is_initialized():
        return DeviceIdentityMemory.on_gpu(IDENTITY_BYTES)
    return None


def open_engine(
    config: ConnectorConfig,
    *,
    is_read: bool,
    reads: bool = True,
    lend: LendEngine | None = None,
    has_secret: bool | None = None,
    qos: int | None = None,
) -> TransferEngine:
    """Return a Mooncake engine, which waits for a peer's connection as for its handshake.

    On CUDA with ``protocol: auto``, it has a second way to peers on the same host.

    Raises:
        ConfigError: the transport is not one of this platform, or the host not of this machine.

    Args:
        is_read: whether peers read this worker's memory.
        reads: whether it reads theirs.
        lend: as ``lender`` returns it.
        has_secret: whether the control channel is authenticated, so that handles of memory may be sent over it; None:
            there is no second way.
        qos: class of traffic on Ascend; None: CANN's.
    """
    protocol, tuning = transport(config), config.tuning
    if protocol == "rdma" and device_type() == "npu":
        raise ConfigError(
            "protocol = 'rdma': on an NPU, Mooncake takes ascend whatever it is told (RoCE between machines); leave "
            "protocol out on both sides"
        )
    if config.protocol == "auto" and protocol != default_protocol():
        logger.warning(
            "PDConnector: this machine has no RDMA device that can be opened and has an active port, so KV cache is "
            "read over tcp, which is slower, and peers must use tcp, too. Pass the devices into the container "
            "(/dev/infiniband), or set protocol to 'tcp' on prefill and decode engines to silence this"
        )
    if lend is not None and qos is not None and is_started():
        logger.warning("PDConnector: qos_priority has no effect: %s has started the transfer engine", ASCEND_STORE)
    options = MooncakeOptions(
        host=_own_host(config) if is_read else config.host or host_address(),
        protocol=protocol,
        devices=config.devices,
        descriptors_per_call=tuning.descriptors_per_call,
        max_descriptors_in_flight=tuning.max_descriptors_in_flight,
        longest_pause_s=None if tuning.longest_poll_us is None else tuning.longest_poll_us * 1e-6,
        connect_timeout_s=ENGINE_LIMITS.handshake_timeout_s,
        cost=read_cost(config),
        qos=qos,
    )
    engine = MooncakeEngine(options, _identity_memory(protocol), lend)
    if has_secret is None or config.protocol != "auto" or device_type() != "cuda":
        return engine
    if not has_secret:
        logger.info("PDConnector: peers on this host are not read over CUDA IPC, which takes a secret (secret_file)")
        return engine
    return with_second_way(engine, is_read=is_read, reads=reads)
