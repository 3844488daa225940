"""Images in the prompts of ``vllm_schedulers``' requests, and what vLLM's encoder makes of them."""

from collections.abc import Mapping, Sequence

import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

#: The parts of an image that come with a request, as vLLM's models name them; "": no encoder is to look at it.
_PARTS: Mapping[str, Sequence[str]] = {"": (), "shape": ("grid",), "whole": ("grid", "pixels")}


class RequestWithImages(Request):  # type: ignore[misc]  # vLLM is untyped here
    """A request whose images an encoder looks at if anything has come of them."""

    @property
    def has_encoder_inputs(self) -> bool:
        return any(each.data is not None for each in self.mm_features)


def an_image(shown: str, offset: int, length: int) -> MultiModalFeatureSpec:
    """An image in a prompt, of which its shape is shown, the whole, or nothing."""
    elements = {
        part: MultiModalFieldElem(torch.ones(1), MultiModalBatchedField(keep_on_cpu=part == "grid"))
        for part in _PARTS[shown]
    }
    data = MultiModalKwargsItem(elements) if elements else None
    return MultiModalFeatureSpec(data, "image", "a picture", PlaceholderRange(offset=offset, length=length))


def add_encoder(scheduler: Scheduler, tokens: int) -> None:
    """Let a scheduler give its worker images of so many tokens in a step; the model has no encoder."""
    scheduler.encoder_cache_manager = EncoderCacheManager(tokens)
    scheduler.max_num_encoder_input_tokens = tokens


def looked_at(requests: Mapping[str, Request], output: SchedulerOutput) -> list[MultiModalFeatureSpec]:
    """Return the images of a step, at which vLLM's encoder looks.

    Raises:
        AssertionError: of one, nothing is there but its shape. vLLM's worker would end, and its engine.
    """
    images = [
        requests[request_id].mm_features[each]
        for request_id, inputs in output.scheduled_encoder_inputs.items()
        for each in inputs
    ]
    assert all("pixels" in each.data for each in images), "an encoder finds nothing to look at"
    return images
