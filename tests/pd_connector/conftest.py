"""Loads vLLM before the tests, and undoes what a connector does to the logging of its process."""

import logging
import warnings
from collections.abc import Iterator

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM and its dependencies deprecate of each other is not ours to fail on
    import pd_connector.connector  # noqa: F401


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    loggers = [logging.getLogger(package) for package in ("layout", "transfer", "pd_connector")]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
