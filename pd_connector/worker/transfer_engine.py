"""The transfer engine of a worker, as the settings ask for it."""

from dataclasses import replace

from layout.cost import CostModel
from pd_connector.config import ConfigError, ConnectorConfig
from pd_connector.vllm.platform import default_protocol, host_address
from pd_connector.worker.device_memory import DeviceIdentityMemory
from transfer.engine.base import TransferEngine
from transfer.engine.mooncake import IDENTITY_BYTES, MooncakeEngine, MooncakeOptions
from transfer.peers import is_own_address


def read_cost(config: ConnectorConfig) -> CostModel:
    """Return what reads cost: what is set, else what suits the protocol."""
    cost = CostModel.of_protocol(transport(config))
    if config.descriptor_cost_us is not None:
        cost = replace(cost, alpha=config.descriptor_cost_us * 1e-6)
    if config.byte_cost_ns is not None:
        cost = replace(cost, beta=config.byte_cost_ns * 1e-9)
    return cost


def transport(config: ConnectorConfig) -> str:
    """Return the protocol of the transfer engine: the setting, or the platform's default."""
    return default_protocol() if config.protocol == "auto" else config.protocol


def _own_host(config: ConnectorConfig) -> str:
    """Return the address at which peers reach this worker.

    Raises:
        ConfigError: it is not an address of this machine, so peers would read another's memory, or none.
    """
    host = config.host or host_address()
    if not is_own_address(host):
        source = "host" if config.host else "vLLM's own choice of host (VLLM_HOST_IP)"
        raise ConfigError(
            f"{source} = {host!r} is not an address of this machine, but peers read this worker's memory there. Set it "
            "to one of this machine's network interfaces. If workers of this engine run on several machines, leave "
            "host unset and set VLLM_HOST_IP on each. An address that is only translated to this machine (NAT) cannot "
            "work, because the system chooses the transfer engine's ports"
        )
    return host


def open_engine(config: ConnectorConfig, *, is_read: bool) -> TransferEngine:
    """Return a Mooncake engine. ``is_read``: whether peers read this worker's memory."""
    protocol = transport(config)
    options = MooncakeOptions(
        host=_own_host(config) if is_read else config.host or host_address(),
        protocol=protocol,
        devices=config.devices,
        descriptors_per_call=config.descriptors_per_call,
        max_descriptors_in_flight=config.max_descriptors_in_flight,
        longest_pause_s=None if config.longest_poll_us is None else config.longest_poll_us * 1e-6,
        connect_timeout_s=config.handshake_timeout_s,
        cost=read_cost(config),
    )
    # Over HCCS, peers cannot read host memory.
    return MooncakeEngine(options, DeviceIdentityMemory.on_npu(IDENTITY_BYTES) if protocol == "ascend" else None)
