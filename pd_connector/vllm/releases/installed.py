"""Which vLLM release is installed, and whether the connector is tested with it."""

import logging
from functools import cache
from typing import TypeAlias

import packaging.version

from pd_connector.vllm.releases.newest import VllmRelease
from pd_connector.vllm.releases.release_023 import Release023
from pd_connector.vllm.releases.release_030 import Release030
from pd_connector.vllm.releases.release_031 import Release031
from pd_connector.vllm.releases.release_032 import Release032

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
    if version is None or version >= (0, 33):
        return VllmRelease()
    since = {(0, 32): Release032, (0, 31): Release031, (0, 30): Release030}
    return next((release() for first, release in since.items() if version >= first), Release023())


def installed_version() -> Version | None:
    """Return the version of the installed vLLM; None if its build does not know it: 0.0, or 0.1 without git's tags."""
    from vllm.version import __version_tuple__  # noqa: PLC0415

    major, minor = __version_tuple__[:2]
    return (int(major), int(minor)) if (major, minor) not in {(0, 0), (0, 1)} else None


def tested_releases() -> str:
    """Return the releases that the connector is tested with, in words."""
    return ", ".join(f"{major}.{minor}" for major, minor in TESTED)


def is_tested(version: str) -> bool:
    """Return whether the connector is tested with a vLLM of that version.

    A build of later sources is named for the release before them: 0.33.1.dev7 is the seventh commit behind 0.33.0, and
    may be all that becomes 0.34. One of the release's own sources, built with changed files, is 0.33.1.dev0.
    """
    try:
        named = packaging.version.Version(version)
    except packaging.version.InvalidVersion:
        return False
    return named.release[:2] in TESTED and not named.dev


def warning_if_untested() -> str:
    """Return what is to be known if the connector is not tested with the installed vLLM; empty if it is."""
    from vllm.version import __version__  # noqa: PLC0415

    if is_tested(__version__):
        return ""
    return (
        f"PDConnector: vLLM {__version__} is not among the releases that this connector is tested with: "
        f"{tested_releases()}. If it fails, install one of these"
    )


def warn_unless_tested() -> None:
    """Log a warning if the connector is not tested with the installed vLLM."""
    if warning := warning_if_untested():
        logger.warning("%s", warning)


def log_limits() -> None:
    """Log what the installed release cannot give."""
    from vllm.version import __version__  # noqa: PLC0415

    for limit in current().limits:
        logger.info("PDConnector: vLLM %s: %s", __version__, limit)
