"""Reads and checks the secret that the engines of a deployment share. Never stores or shows it.

The secret itself is not a setting, because vLLM prints its configuration.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from pd_connector.config import ConfigError
from transfer.control.keys import MIN_SECRET_BYTES, ControlKeys

ENVIRONMENT = "PD_CONNECTOR_SECRET"

_MAX_FILE_BYTES = 65536
_MAKE_ONE = "make one with `openssl rand -base64 32`"


def load_keys(secret_file: str | None, environ: Mapping[str, str] = os.environ) -> ControlKeys | None:
    """Return the keys of the control channel, from the file or else the environment; None if neither is set.

    Whitespace around the secret is ignored.

    Raises:
        ConfigError: both are set, the file is unusable or accessible to others, or the secret is too short.
        ControlStartError: this build of ZeroMQ has no authentication.
    """
    from_environment = environ.get(ENVIRONMENT)
    if secret_file is None:
        if from_environment is None:
            return None
        return _keys(from_environment.encode(errors="surrogateescape"), f"the environment variable {ENVIRONMENT}")
    if from_environment is not None:
        raise ConfigError(
            f"secret_file = {secret_file!r} and the environment variable {ENVIRONMENT} are both set: unset one of them"
        )
    return _keys(_read(secret_file), f"secret_file = {secret_file!r}")


def _keys(text: bytes, source: str) -> ControlKeys:
    secret = text.strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"{source}: the secret has {len(secret)} bytes, not counting whitespace around it; it must have at least "
            f"{MIN_SECRET_BYTES}: {_MAKE_ONE}"
        )
    return ControlKeys.derive(secret)


def _read(secret_file: str) -> bytes:
    try:
        # One descriptor: the file that is checked is the file that is read. A pipe without a writer must not block.
        descriptor = os.open(Path(secret_file).expanduser(), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no such home directory
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"secret_file = {secret_file!r} cannot be read: {reason}") from error
    try:
        return _read_checked(descriptor, secret_file)
    finally:
        os.close(descriptor)


def _read_checked(descriptor: int, secret_file: str) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"secret_file = {secret_file!r} is not a regular file: {_MAKE_ONE} > FILE")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"secret_file = {secret_file!r} has mode {mode:04o}, which gives others than its owner access: run "
            f"chmod 600 {secret_file}"
        )
    text = os.read(descriptor, _MAX_FILE_BYTES + 1)
    if len(text) > _MAX_FILE_BYTES:
        raise ConfigError(f"secret_file = {secret_file!r} has more than {_MAX_FILE_BYTES} bytes: is it the right file?")
    return text
