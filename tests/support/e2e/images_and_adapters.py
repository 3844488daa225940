"""Servers of a model that reads images and has LoRA adapters, and prompts for them."""

import json
from dataclasses import replace

from tests.support.e2e.architectures import PARTS_IN_ORDER
from tests.support.e2e.client import MODEL_NAME, Chat
from tests.support.e2e.cluster import ServerSpec
from tests.support.e2e.deployments import Deployment, decode, prefill
from tests.support.e2e.images import Image
from tests.support.e2e.models import ModelSpec
from tests.support.e2e.pair import make_text

ADAPTERS = ("red", "blue")
_NGRAM_DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}

#: Of answers. This reasoning parser does nothing but where a request wants thinking.
_PARSERS = (
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--tool-strict-level", "parameter",
    "--reasoning-parser", "deepseek_v3",
    "--reasoning-config", '{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}',
    "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}',
)  # fmt: skip


def _reads_images(spec: ServerSpec, adapters: tuple[str, ...], *arguments: str) -> ServerSpec:
    model = ModelSpec(architecture="idefics3", adapters=adapters)
    more = ("--enable-scale-out", "--chat-template", PARTS_IN_ORDER)  # the first serves /inference/v1/generate
    return replace(spec, model=model, layout=None, arguments=(*spec.arguments, *more, *_PARSERS, *arguments))


#: The servers number the adapters differently. P computes prompts in chunks that may end within an image; D drafts
#: tokens, and P does not.
IMAGES_AND_ADAPTERS = Deployment(
    "images and adapters",
    (
        ("P", _reads_images(prefill(), ADAPTERS, "--max-num-batched-tokens", "256")),
        ("D", _reads_images(decode(patient=True), ADAPTERS[::-1], "--speculative-config", json.dumps(_NGRAM_DRAFTS))),
    ),
)


def about(*images: Image, seed: object, characters: int = 200, model: str = MODEL_NAME) -> Chat:
    """A prompt with images in the middle of random text. Equal seeds give equal text."""
    text = make_text(characters, seed)
    return Chat((text[: characters // 2], *images, text[characters // 2 :]), model)
