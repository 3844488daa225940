"""Tests of what only some releases of vLLM have."""

import pytest
from vllm.version import __version_tuple__

#: The first two numbers of the installed vLLM.
INSTALLED = __version_tuple__[:2]


def since(version: tuple[int, int], what: str) -> pytest.MarkDecorator:
    """Skip a test on vLLM before ``version``, which ``what`` came with."""
    major, minor = version
    return pytest.mark.skipif(version > INSTALLED, reason=f"vLLM has {what} since {major}.{minor}")
