"""What a command line means: servers in either way of naming them, and the servers' key."""

import pytest

from pd_proxy import Settings
from pd_proxy.__main__ import Server, parse

D = ["--decode", "http://d:1"]


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def refusal(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The message with which a command line is refused."""
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_urls_may_end_in_a_slash_and_be_repeated() -> None:
    settings, server = parse(["--prefill", "http://a:1/", "--prefill", "https://b", *D])
    assert settings == Settings(prefill=("http://a:1", "https://b"), decode=("http://d:1",))
    assert server == Server("127.0.0.1", 8000, 2)
    assert not settings.status_page
    assert parse(["--prefill", "http://a:1", *D, "--status-page"])[0].status_page
    assert not settings.plain_chats
    draining, _ = parse(["--prefill", "http://a:1", *D, "--draining", "a/file", "--plain-chats"])
    assert (draining.draining, draining.plain_chats) == ("a/file", True)


@pytest.mark.parametrize(
    ("arguments", "urls"),
    [
        (["--prefiller-hosts", "a", "b", "--prefiller-ports", "1", "2"], ("http://a:1", "http://b:2")),
        (["--prefiller-host", "a", "--prefiller-port", "1"], ("http://a:1",)),
        (
            ["--prefiller-hosts", "a", "--prefiller-hosts", "b", "--prefiller-ports", "1", "2"],
            ("http://a:1", "http://b:2"),
        ),
        (["--prefiller-hosts", "a", "b"], ("http://a:8100", "http://b:8100")),
        (["--prefiller-ports", "1", "2"], ("http://localhost:1", "http://localhost:2")),
        (
            ["--prefiller-hosts", "10.0.0.1", "::1", "--prefiller-ports", "1", "2"],
            ("http://10.0.0.1:1", "http://[::1]:2"),
        ),
    ],
    ids=" ".join,
)
def test_prefill_servers_may_be_named_as_in_vllm(arguments: list[str], urls: tuple[str, ...]) -> None:
    settings, _ = parse([*arguments, *D])
    assert (settings.prefill, settings.decode) == (urls, ("http://d:1",))


def test_decode_servers_may_be_named_as_in_vllm() -> None:
    prefill = ["--prefill", "http://p:1"]
    by_name = parse([*prefill, "--decoder-hosts", "a", "b", "--decoder-ports", "1", "2"])[0]
    assert by_name.decode == ("http://a:1", "http://b:2")
    assert parse([*prefill, "--decoder-host", "a"])[0].decode == ("http://a:8200",)
    assert parse([*prefill, "--decoder-port", "1"])[0].decode == ("http://localhost:1",)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "no prefill server; name at least one, with --prefill http://HOST:PORT"),
        (["--prefill", "localhost:1"], "prefill server 'localhost:1' is not a base URL"),
        (
            ["--prefill", "http://a:1", "--prefiller-ports", "1"],
            "prefill servers are named twice, by --prefill and by --prefiller-hosts or --prefiller-ports; use one way",
        ),
        (
            ["--prefiller-hosts", "a", "b", "--prefiller-ports", "1"],
            "--prefiller-hosts names 2 and --prefiller-ports 1; give one port for each host, in order",
        ),
        (
            ["--prefiller-ports", "70000"],
            "prefill server 'http://localhost:70000' is not a base URL; write http://HOST:PORT",
        ),
        (["--prefiller-ports", "0"], "prefill server 'http://localhost:0' is not a base URL"),
        (["--prefiller-ports", "http"], "argument --prefiller-ports/--prefiller-port: invalid int value: 'http'"),
        (
            ["--prefiller-hosts", "http://a"],
            "--prefiller-hosts has 'http://a'; write a host name or an IP address there",
        ),
        (["--prefiller-hosts", "a:1"], "--prefiller-hosts has 'a:1'; write a host name or an IP address there"),
        (["--prefiller-hosts", ""], "--prefiller-hosts has ''; write a host name or an IP address there"),
        (["--prefill", "http://a b:1"], "prefill server 'http://a b:1' is not a base URL; write http://HOST:PORT"),
        (["--prefill", "http://[a:1"], "prefill server 'http://[a:1' is not a base URL; write http://HOST:PORT"),
        (["--prefiller-hosts", "a", "a"], "a prefill server is named twice: http://a:8100, http://a:8100"),
        (["--prefiller", "http://a:1"], "unrecognized arguments: --prefiller http://a:1"),
        (["--prefill", "http://a:1", "--shutdown-timeout", "-1"], "--shutdown-timeout is -1; it must be 0 or more"),
        (["--prefill", "http://a:1", "--port", "99999"], "--port is 99999; it must be in 0..65535"),
        (["--prefill", "http://a:1", "--port", "-1"], "--port is -1; it must be in 0..65535"),
    ],
    ids=str,
)
def test_servers_that_cannot_be_meant_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert told in refusal(capsys, [*arguments, *D])


def test_the_decode_leg_has_its_own_names_in_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    both = ["--prefill", "http://p:1", "--decode", "http://d:1", "--decoder-hosts", "d"]
    assert "decode servers are named twice, by --decode and by --decoder-hosts" in refusal(capsys, both)


@pytest.mark.parametrize(
    ("arguments", "variables", "key"),
    [
        ([], {}, None),
        ([], {"VLLM_API_KEY": "from-environment"}, "from-environment"),
        (["--api-key", "given"], {"VLLM_API_KEY": "from-environment"}, "given"),
        ([], {"VLLM_API_KEY": ""}, None),
        ([], {"OPENAI_API_KEY": "of another service"}, None),
    ],
    ids=str,
)
def test_the_key_is_given_or_vllms_own_variable(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], variables: dict[str, str], key: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert parse(["--prefill", "http://p:1", *D, *arguments])[0].api_key == key


def test_a_wrong_key_is_refused_without_being_shown(capsys: pytest.CaptureFixture[str]) -> None:
    told = refusal(capsys, ["--prefill", "http://p:1", *D, "--api-key", "my secret"])
    assert "the API key is empty or has characters other than ASCII" in told
    assert "secret" not in told


@pytest.mark.parametrize(
    ("arguments", "legs"),
    [([], "together"), (["--legs", "together"], "together"), (["--legs", "in-turn"], "in-turn")],
    ids=str,
)
def test_legs_go_together_unless_told_otherwise(arguments: list[str], legs: str) -> None:
    assert parse(["--prefill", "http://p:1", *D, *arguments])[0].legs == legs


def test_the_first_token_is_ps_unless_told_otherwise() -> None:
    servers = ["--prefill", "http://p:1", *D]
    assert parse(servers)[0].first_token == "prefill"
    assert parse([*servers, "--first-token", "decode"])[0].first_token == "decode"


def test_without_prefill_servers_requests_fail_unless_told_otherwise() -> None:
    servers = ["--prefill", "http://p:1", *D]
    assert parse(servers)[0].without_prefill == "fail"
    assert parse([*servers, "--without-prefill", "decode"])[0].without_prefill == "decode"


def test_another_way_of_legs_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "invalid choice: 'parallel'" in refusal(capsys, ["--prefill", "http://p:1", *D, "--legs", "parallel"])
