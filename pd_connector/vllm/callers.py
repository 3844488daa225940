"""Who called us, further up the stack.

vLLM hands a connector configurations, and neither its engine core nor the model that it loads; nothing else refers to
the two either, and one process may hold several engines. While one of them constructs the connector or hands over its
caches, it is on the stack.
"""

import sys
from collections.abc import Iterator
from types import FrameType


def callers() -> Iterator[object]:
    """Yield the objects whose methods are being called on this thread, the innermost first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if (caller := frame.f_locals.get("self")) is not None:
            yield caller
        frame = frame.f_back


def has_siblings() -> bool:
    """Return whether a connector of several connectors, vLLM's or vllm-ascend's, is calling."""
    return any(type(each).__name__.endswith("MultiConnector") for each in callers())
