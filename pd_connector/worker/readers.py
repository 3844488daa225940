"""What carries out a worker's reads, as the settings ask for it."""

from collections.abc import Sequence

import torch

from layout.geometry import Region, WorkerGeometry
from pd_connector.config import ConfigError, ConnectorConfig
from pd_connector.worker.device_fence import landing, nothing_to_land
from pd_connector.worker.remote_reader import RemoteReader
from pd_connector.worker.transfer_engine import read_cost


def remote_reader(
    config: ConnectorConfig, geometry: WorkerGeometry, tensors: Sequence[torch.Tensor], *, on_host: bool
) -> RemoteReader:
    """Return what reads to the caches, which ``tensors`` hold.

    Raises:
        ConfigError: tuning.staging_bytes is too little.
    """
    cost, staging_bytes = read_cost(config), config.tuning.staging_bytes
    land = landing(geometry.transport, tensors[0].device) if tensors else nothing_to_land
    if not (staging_bytes and tensors):
        return RemoteReader(cost, geometry.regions, land=land)
    if on_host:
        return host_reader(config, geometry.regions)
    return RemoteReader.with_device_staging(cost, geometry.regions, staging_bytes, tensors, land)


def host_reader(config: ConnectorConfig, pool: tuple[Region, ...]) -> RemoteReader:
    """Return what reads to host memory, which the host reshapes, whatever the device is.

    Raises:
        ConfigError: tuning.staging_bytes is too little.
    """
    staging_bytes = config.tuning.staging_bytes
    if not staging_bytes:
        return RemoteReader(read_cost(config), pool)
    try:
        return RemoteReader.with_staging(read_cost(config), pool, staging_bytes)
    except ValueError as error:
        raise ConfigError(f"tuning.staging_bytes = {staging_bytes}: {error}; 0 turns staging off") from error
