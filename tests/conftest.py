"""Property tests have no deadline: on a busy machine an example may take any time, and be right."""

import gc
from contextlib import suppress

import pytest

gc.disable()  # until everything is collected: with vLLM, each of its passes takes a second

with suppress(ImportError):  # not every environment that runs some of the tests has it
    from hypothesis import settings

    settings.register_profile("without deadline", deadline=None)
    settings.load_profile("without deadline")


with suppress(ImportError):  # numba
    from tests.support.kernels import keep_compiled

    keep_compiled()


def pytest_collection_finish() -> None:
    """Look for garbage among what is made from now on only."""
    gc.freeze()
    gc.enable()


def pytest_sessionstart(session: pytest.Session) -> None:
    """The process that starts the others collects nothing."""
    if session.config.pluginmanager.hasplugin("dsession"):
        gc.enable()


def pytest_unconfigure() -> None:
    """Compiled libraries complain at the exit about what is left of them."""
    gc.unfreeze()
