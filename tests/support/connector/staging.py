"""A staging buffer for a decode worker, and a prefill engine of which pulls are staged."""

from dataclasses import replace

import torch

from layout.cost import CostModel
from pd_connector.worker.remote_reader import SLOTS, RemoteReader
from tests.support.connector.engines import PREFILL, DecodeWorker
from transfer.memory import SlotPool

TCP = CostModel.of_protocol("tcp")
#: Two ranks with two heads each, read by one with four: all heads of a token lie apart in the destination.
TWO_RANKS = replace(PREFILL, layout="LBHNC", tp=2)


def stage(worker: DecodeWorker, slot_bytes: int, *, on_device: bool = False) -> SlotPool:
    """Give a worker a staging buffer; its pulls are then read through it where that is cheaper."""
    regions = worker.rank.geometry.regions
    if on_device:
        caches = [torch.from_numpy(worker.rank.memory)[8:16]]
        worker.reads = RemoteReader.with_device_staging(TCP, regions, slot_bytes * SLOTS, caches)
    else:
        worker.reads = RemoteReader.with_staging(TCP, regions, slot_bytes * SLOTS)
    assert worker.reads.staging is not None
    worker.engine.register([worker.reads.staging.region])
    return worker.reads.staging
