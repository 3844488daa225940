"""Images for prompts, as clients send them."""

import base64
import io
from dataclasses import dataclass

import numpy as np
from PIL import Image as Pillow

from tests.support.e2e.architectures import IMAGE_SIZE


@dataclass(frozen=True, slots=True)
class Image:
    """An image in a chat. ``url`` holds it."""

    url: str


def make_image(seed: int) -> Image:
    """An image of random pixels; equal seeds give equal images."""
    pixels = np.random.default_rng(seed).integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, "PNG")
    return Image(f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}")
