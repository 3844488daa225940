"""Which vLLM release is installed, and whether the connector is tested with it."""

import logging
from functools import cache
from typing import TypeAlias

from pd_connector.vllm.releases.newest import VllmRelease
from pd_connector.vllm.releases.release_023 import Release023
from pd_connector.vllm.releases.release_030 import Release030
from pd_connector.vllm.releases.release_031 import Release031

#: A child of vLLM's logger, so that vLLM's handlers and level apply.
logger = logging.getLogger(f"vllm.{__name__}")

#: The first two numbers of a release: (0, 32) is vLLM 0.32 with all its patch releases.
Version: TypeAlias = tuple[int, int]

#: The releases that the connector is tested with, oldest first.
TESTED: tuple[Version, ...] = ((0, 23), (0, 30), (0, 31), (0, 32), (0, 33))
#: Those of vllm-ascend, on a simulated device.
TESTED_ASCEND = ("0.23.0.post1", "0.30.0rc2")


@cache
def current() -> VllmRelease:
    """Return the installed release."""
    return release_of(installed_version())


def release_of(version: Version | None) -> VllmRelease:
    """Return the release of a version, or the one nearest to it; the newest if the version is not known."""
    if version is None or version >= (0, 32):
        return VllmRelease()
    if version >= (0, 30):
        return Release031() if version >= (0, 31) else Release030()
    return Release023()


def installed_version() -> Version | None:
    """Return the version of the installed vLLM; None if its build does not know it: 0.0, or 0.1 without git's tags."""
    from vllm.version import __version_tuple__  # noqa: PLC0415

    major, minor = __version_tuple__[:2]
    return (int(major), int(minor)) if (major, minor) not in {(0, 0), (0, 1)} else None


def tested_releases() -> str:
    """Return the releases that the connector is tested with, in words."""
    return ", ".join(f"{major}.{minor}" for major, minor in TESTED)


def warn_unless_tested() -> None:
    """Log a warning if the connector is not tested with the installed release."""
    from vllm.version import __version__  # noqa: PLC0415

    if installed_version() not in TESTED:
        logger.warning(
            "PDConnector: vLLM %s is not among the releases that this connector is tested with: %s. If it fails, "
            "install one of these", __version__, tested_releases(),
        )  # fmt: skip


def log_limits() -> None:
    """Log what the installed release cannot give."""
    from vllm.version import __version__  # noqa: PLC0415

    for limit in current().limits:
        logger.info("PDConnector: vLLM %s: %s", __version__, limit)
