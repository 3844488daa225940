"""Servers with https, whose certificates a CA of their own has signed."""

import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from pd_proxy.__main__ import parse
from tests.support.certificates import own_authority
from tests.support.examples.fake_servers import FakeServer, decodes, prefills
from tests.support.examples.served_proxy import ProxySetup


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    return own_authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def servers(setup: ProxySetup, authority: tuple[Path, ssl.SSLContext]) -> tuple[FakeServer, FakeServer]:
    return setup.server(prefills, tls=authority[1]), setup.server(decodes, tls=authority[1])


@pytest.mark.parametrize("by", ["option", "variable"])
def test_a_ca_that_is_named_is_trusted(
    setup: ProxySetup,
    servers: tuple[FakeServer, FakeServer],
    authority: tuple[Path, ssl.SSLContext],
    monkeypatch: pytest.MonkeyPatch,
    by: str,
) -> None:
    p, d = servers
    ca_file = str(authority[0])
    if by == "variable":
        monkeypatch.setenv("SSL_CERT_FILE", ca_file)
    proxy = setup.proxy([p], [d], ca_file=ca_file if by == "option" else None)
    assert proxy.complete().status_code == 200
    assert proxy.http.get("/health").status_code == 200


def test_the_command_line_names_it(authority: tuple[Path, ssl.SSLContext]) -> None:
    arguments = ["--prefill", "https://p", "--decode", "http://d"]
    ca_file = str(authority[0])
    assert parse([*arguments, "--ca-file", ca_file])[0].ca_file == ca_file
    assert parse(arguments)[0].ca_file is None


def test_a_ca_that_nobody_has_named_is_not_trusted_and_the_option_is_said(
    setup: ProxySetup, servers: tuple[FakeServer, FakeServer], access_lines: Callable[[int], list[str]]
) -> None:
    p, d = servers
    proxy = setup.proxy([p], [d])
    response = proxy.complete()
    assert response.status_code == 502
    assert response.json()["error"]["message"] == "a prefill server has a certificate that cannot be verified"
    (line,) = access_lines(1)
    assert f"prefill server {p.url} has a certificate that cannot be verified: " in line
    assert "certificate verify failed" in line
    assert "--ca-file" in line
    assert p.received == []
    assert proxy.http.get("/health").status_code == 503


@pytest.mark.parametrize("content", [None, b"", b"no certificate"])
@pytest.mark.parametrize("named", ["--ca-file", "SSL_CERT_FILE"])
def test_a_file_without_certificates_is_explained(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    named: str,
) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)
    arguments = ["--prefill", "https://p", "--decode", "http://d"]
    if named == "--ca-file":
        arguments += [named, str(path)]
    else:
        monkeypatch.setenv(named, str(path))
    with pytest.raises(SystemExit):
        parse(arguments)
    assert f"error: {named} is '{path}', which cannot be used" in capsys.readouterr().err
    parse(["--prefill", "http://p", "--decode", "http://d"])  # where no server has https, nobody asks
