"""A connector that moves nothing, for a place beside ours in MultiConnector: it has a handshake and statistics.

Like NIXL's, its scheduler side refuses the handshakes of other connectors, and its statistics are looked up by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from tests.support.connector.idle import IdleConnector


@dataclass(frozen=True)
class Greeting(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM is untyped here
    """The handshake of one worker."""

    words: str


class GreetingStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is untyped here
    """How many steps a worker has taken, as ``steps``."""

    def reset(self) -> None:
        self.data = {"steps": 0}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data["steps"] += other.data["steps"]
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data["steps"]


class GreetingMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM is untyped here
    """Exports the steps as ``greeting_steps_total``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        steps = metric_types[Counter](name="greeting_steps", documentation="Steps.", labelnames=labelnames)
        self._steps = {engine: steps.labels(*values) for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._steps[engine_idx].inc(transfer_stats_data["steps"])


class GreetingConnector(IdleConnector):
    """Says hello and counts steps."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.greetings: list[str] = []
        self._steps = 0

    def get_handshake_metadata(self) -> Greeting:
        return Greeting("hello")

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        for greeting in metadata.values():
            if not isinstance(greeting, Greeting):
                raise TypeError(f"expected a Greeting, got {greeting!r}")
            self.greetings.append(greeting.words)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._steps += 1

    def get_kv_connector_stats(self) -> GreetingStats | None:
        steps, self._steps = self._steps, 0
        return GreetingStats({"steps": steps}) if steps else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> GreetingStats:
        return GreetingStats(data or {"steps": 0})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> GreetingMetrics:
        return GreetingMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


if "GreetingConnector" not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector("GreetingConnector", __name__, "GreetingConnector")
