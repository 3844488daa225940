"""vLLM's ``MooncakeConnector`` on the CPU platform, for vLLM's ``kv_connector_module_path``.

Two changes, and no other:

- its worker asks ``torch.accelerator`` for the device's index, which raises where there is no accelerator; here it is
  told 0. The connector does nothing with it on CPU.
- it exports no metrics. What it records for its log (duration, bytes, descriptors of a transfer) is also appended to
  the file that ``PD_BENCHMARK_TRANSFERS`` names, a line each.
"""

import json
import os
from pathlib import Path

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.stats import MooncakeKVConnectorStats

from benchmarks.peers.connectors import TRANSFERS

__all__ = ["MooncakeConnector"]


def _first_device() -> int:
    return 0


if not torch.accelerator.is_available():
    torch.accelerator.current_device_index = _first_device

_record = MooncakeKVConnectorStats.record_transfer


def _record_in_a_file(stats: MooncakeKVConnectorStats, duration_s: float, total_bytes: int, num_descs: int) -> None:
    _record(stats, duration_s, total_bytes, num_descs)
    if path := os.environ.get(TRANSFERS):
        with Path(path).open("a") as file:
            file.write(json.dumps([duration_s, total_bytes, num_descs]) + "\n")


MooncakeKVConnectorStats.record_transfer = _record_in_a_file
