"""Other releases of vLLM than the installed one: tests of what only some have, and their environments."""

from pathlib import Path

import pytest
from vllm.version import __version_tuple__

#: Releases of which ``make test-versions`` makes an environment each.
OTHERS = ("0.23", "0.30", "0.31")

#: Those of them on which a layout of the KV cache can be asked for.
WITH_LAYOUTS = ("0.30", "0.31")

#: The first two numbers of the installed vLLM.
INSTALLED = __version_tuple__[:2]


def module_needs(version: tuple[int, int], what: str) -> None:
    """Skip the module that calls this on vLLM before ``version``, which ``what`` came with. Call it before imports."""
    if version > INSTALLED:
        pytest.skip(f"vLLM has {what} since {version[0]}.{version[1]}", allow_module_level=True)


def since(version: tuple[int, int], what: str) -> pytest.MarkDecorator:
    """Skip a test on vLLM before ``version``, which ``what`` came with."""
    major, minor = version
    return pytest.mark.skipif(version > INSTALLED, reason=f"vLLM has {what} since {major}.{minor}")


#: Of tests that see what is complete at once: before, the last steps of other requests count as under way.
counts_under_way = since((0, 30), "a count of each request's tokens that steps work on")


def before(version: tuple[int, int], what: str) -> pytest.MarkDecorator:
    """Skip a test on vLLM since ``version``, which ``what`` came with."""
    major, minor = version
    return pytest.mark.skipif(version <= INSTALLED, reason=f"vLLM has {what} since {major}.{minor}")


def interpreter(release: str) -> Path:
    """The Python of the environment that ``make test-versions`` makes of a release."""
    return Path(__file__).parents[2] / f".venv-vllm-{release}" / "bin" / "python"
