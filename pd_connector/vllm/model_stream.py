"""The stream on which vLLM's model computes."""

import logging
import multiprocessing
import sys
import threading
from typing import Any

import torch

logger = logging.getLogger(__name__)


def event_after_steps(device: torch.device) -> Any:
    """Return an event behind all work of the steps that the calling thread has launched.

    Behind the sampler and ``wait_for_save``, vllm-ascend moves the states of drafted tokens on its ``global_stream``,
    for which the model's stream then waits.
    """
    own = torch.get_device_module(device).current_stream(device)
    other = getattr(sys.modules.get("vllm_ascend.utils"), "_GLOBAL_STREAM", None)
    if other is not None:
        own.wait_event(other.record_event())
    return own.record_event()


def leave_default_stream(device: torch.device) -> None:
    """Let the model of a single rank compute on a stream of its own. Call it when its caches are registered.

    On the default stream, a copy of Mooncake's waits for all that the model has been given, and the model for the copy.
    vLLM means to compute on another, but with one rank nothing asks it for that before something sets a stream and
    sets it back, which vLLM takes for a choice. With more ranks, NCCL asks, and pipelines keep what they find.

    Only where one thread runs every step: each thread has a current stream of its own, and vLLM keeps that of the first
    step for all. The main thread of a process that vLLM has started does, but an actor of Ray may not, nor the process
    of a user who holds the engine.
    """
    if multiprocessing.parent_process() is None or threading.current_thread() is not threading.main_thread():
        return
    default = torch.cuda.default_stream(device)
    if torch.cuda.current_stream(device) != default:
        return
    own = torch.cuda.Stream(device)
    own.wait_stream(default)
    torch.cuda.set_stream(own)  # vLLM's version of it, which notes the stream for vLLM's own use
    logger.info("PDConnector: the model computes on a stream of its own, so that Mooncake's copies do not wait for it")
