"""The shared secret: from one place, long enough, readable by nobody else, and never shown."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pd_connector.config import ConfigError
from pd_connector.secret import ENVIRONMENT, load_keys
from transfer.control.keys import ControlKeys

SECRET = "correct horse battery staple"


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    return path


def test_without_a_secret_there_are_no_keys() -> None:
    assert load_keys(None, {}) is None


def test_file_and_environment_give_the_same_keys(secret_file: Path) -> None:
    keys = ControlKeys.derive(SECRET.encode())
    assert load_keys(str(secret_file), {}) == keys
    assert load_keys(None, {ENVIRONMENT: f"  {SECRET}\n"}) == keys


def test_the_home_directory_may_be_meant(secret_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(secret_file.parent))
    assert load_keys("~/secret", {}) is not None


def test_both_places_at_once_are_refused(secret_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"secret_file = .* and the environment variable PD_CONNECTOR_SECRET"):
        load_keys(str(secret_file), {ENVIRONMENT: SECRET})


@pytest.mark.parametrize("secret", ["", "fifteen bytes !", " " * 40])
def test_a_short_secret_is_refused_and_an_empty_one_is_not_taken_for_none(secret: str, secret_file: Path) -> None:
    secret_file.write_text(secret)
    for file, environ in ((str(secret_file), {}), (None, {ENVIRONMENT: secret})):
        with pytest.raises(ConfigError, match=r"the secret has \d+ bytes.*at least 16.*openssl rand") as refusal:
            load_keys(file, environ)
        assert not secret.strip() or secret not in str(refusal.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o644])
def test_a_file_that_is_open_to_others_is_refused_with_the_way_out(secret_file: Path, mode: int) -> None:
    secret_file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"has mode {mode:04o}, .* chmod 600 {secret_file}") as refusal:
        load_keys(str(secret_file), {})
    assert SECRET not in str(refusal.value)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_of_its_owner_alone_is_taken(secret_file: Path, mode: int) -> None:
    secret_file.chmod(mode)
    assert load_keys(str(secret_file), {}) is not None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "cannot be read: No such file"),
        (lambda path: path.mkdir(), "is not a regular file"),
        (lambda path: os.mkfifo(path, 0o600), "is not a regular file"),
        (lambda path: path.write_bytes(bytes(70_000)) and path.chmod(0o600), "has more than 65536 bytes"),
    ],
    ids=["missing", "directory", "pipe", "huge"],
)
def test_what_is_no_secret_file_is_named(tmp_path: Path, make: Callable[[Path], object], words: str) -> None:
    path = tmp_path / "other"
    make(path)
    with pytest.raises(ConfigError, match=rf"secret_file = '{path}' {words}"):
        load_keys(str(path), {})


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_keys("a\0b", {})


def test_a_home_directory_that_nobody_has_is_named() -> None:
    with pytest.raises(ConfigError, match=r"secret_file = '~nobody-of-this-name/secret' cannot be read"):
        load_keys("~nobody-of-this-name/secret", {})
