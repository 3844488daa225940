"""Where a visit pulls to: memory of this process, a transfer engine, and what pulls of a decode worker share."""

from dataclasses import dataclass

from layout.geometry import WorkerGeometry
from pd_connector.config import ConnectorConfig
from pd_connector.doctor.decode import at
from pd_connector.engine_limits import ENGINE_LIMITS
from transfer.control.client import ControlClient
from transfer.control.messages import Welcome
from transfer.memory import HostMemory
from transfer.peers import AllowedPeers


@dataclass(frozen=True, slots=True)
class Pulled:
    """One pull that has succeeded."""

    tokens: int
    size: int  # bytes
    descriptors: int
    seconds: dict[str, float]  # by phase
    predicted_s: float

    @property
    def read_s(self) -> float:
        """How long the reads took, copies included."""
        return max(self.seconds["read"], 1e-9)

    @property
    def bytes_per_s(self) -> float:
        """How fast they were."""
        return self.size / self.read_s


class PullTarget:
    """Memory of this process that is pulled into, and what pulls of a decode worker share."""

    def __init__(self, config: ConnectorConfig, local: WorkerGeometry, welcome: Welcome, client: ControlClient) -> None:
        """Allocate and register it.

        Raises:
            EngineStartError: the transfer engine does not start, or refuses the memory.
        """
        from pd_connector.worker.checksums import CacheChecksums  # noqa: PLC0415
        from pd_connector.worker.peer import PullContext  # noqa: PLC0415  needs torch
        from pd_connector.worker.remote_reader import RemoteReader  # noqa: PLC0415
        from pd_connector.worker.transfer_engine import open_engine, read_cost  # noqa: PLC0415
        from pd_connector.worker.verification import Verifier  # noqa: PLC0415

        self._memory = HostMemory(local.regions[0].size)
        self._memory.allocate()
        self.region = self._memory.region
        self._engine = open_engine(config, is_read=False)
        try:
            engine = self._engine
            self.local = at(local, self.region.address, engine.address, config.protocol, engine.identity)
            cost = read_cost(config)
            if config.tuning.staging_bytes:
                reads = RemoteReader.with_staging(cost, self.local.regions, config.tuning.staging_bytes)
            else:
                reads = RemoteReader(cost, self.local.regions)
            engine.register((self.region, *reads.regions))
            self.context = PullContext(
                local=self.local,
                model=welcome.model,
                engine=engine,
                client=client,
                allowed=AllowedPeers(config.allowed_peers),
                reader=0,
                readers=1,
                reads=reads,
                handshake_timeout_s=ENGINE_LIMITS.handshake_timeout_s,
                pull_timeout_s=config.pull_timeout_s,
                verifier=Verifier(CacheChecksums(self.local), client) if welcome.verify else None,
            )
        except BaseException:
            self._engine.close()
            raise

    def close(self) -> None:
        """End the engine."""
        self._engine.close()
