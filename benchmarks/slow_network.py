"""PDConnector over a slow network, as a model: each rank's reads are spread over the time that so many bytes take.

For vLLM's ``kv_connector_module_path``. The rate is that of ``PD_BENCHMARK_BYTES_PER_S``, which all links of a worker
share.
"""

import os
from functools import partial
from typing import Any

from benchmarks.slow_engine import Network, SlowEngine
from pd_connector import PDConnector as Connector
from pd_connector.worker.worker import ConnectorWorker


class PDConnector(Connector):
    """The connector, with a slow engine in its worker."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        worker = self._worker_side
        if isinstance(worker, ConnectorWorker):
            network = Network(float(os.environ["PD_BENCHMARK_BYTES_PER_S"]))
            worker._make_engine = partial(_slow_engine, worker._make_engine, network)


def _slow_engine(make: Any, network: Network, config: Any) -> Any:
    return SlowEngine(make(config), network)
