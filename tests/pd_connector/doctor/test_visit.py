"""Visits to what stands in for a P, in this process and in another, over real Mooncake TCP: all well, and with faults.

Covers: pd_connector.doctor.standin, pd_connector.doctor.target.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pd_connector.config import ConnectorConfig
from pd_connector.doctor.decode import Sizes
from pd_connector.doctor.findings import CheckFailed, Examination, Outcome
from pd_connector.doctor.http import Answer, HttpServer, base_url
from pd_connector.doctor.standin import Listener, serve_apart
from pd_connector.doctor.visit import Visit, Wishes
from tests.support.process import free_port

HOST = "127.0.0.1"
IN_ORDER = ["peer", "lease", "handshake", "geometry", "conversion", "plan", "link", "pull"]
SMALL = Wishes(pull_bytes=1 << 20)


def settings(**config: object) -> ConnectorConfig:
    return ConnectorConfig.model_validate({"tuning": {"staging_bytes": 1 << 20}} | config)


def secret(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def report_of(visit: Visit) -> Examination:
    report = Examination()
    try:
        report.run_chain(visit.checks)
    finally:
        visit.close()
    return report


def visit_to(
    address: str, wishes: Wishes = SMALL, server: type[HttpServer] = HttpServer, **config: object
) -> Examination:
    return report_of(Visit(server(base_url(address), None, 20.0), settings(**config), HOST, "tcp", wishes))


def only_failure(report: Examination) -> tuple[str, str]:
    """The name and the text of the check that has failed; those after it were skipped."""
    failed = [line for line in report.lines if line.verdict.outcome is Outcome.FAIL]
    assert len(failed) == 1, [str(line) for line in report.lines]
    behind = report.lines[report.lines.index(failed[0]) + 1 :]
    assert {line.verdict.outcome for line in behind} <= {Outcome.SKIP}
    assert [line.name for line in report.lines] == IN_ORDER
    return failed[0].name, failed[0].verdict.text


@pytest.fixture(scope="module")
def listener() -> Iterator[Listener]:
    listener = Listener(settings(), HOST, "tcp", 0)
    yield listener
    listener.close()


@pytest.fixture
def at_rest(listener: Listener) -> Iterator[Listener]:
    """The listener, which holds no lease after the test."""
    yield listener
    assert listener._leases.active == 0
    listener._service.check_integrity()


def test_all_is_well(at_rest: Listener) -> None:
    report = visit_to(at_rest.address, Wishes(tokens=1000, pull_bytes=4 << 20))
    assert [(line.name, line.verdict.outcome) for line in report.lines] == [(name, Outcome.OK) for name in IN_ORDER]
    found = {line.name: line.verdict for line in report.lines}
    assert found["handshake"].values["verify"] is True
    assert found["geometry"].values["token_bytes"] == 8 * 8 * 256 * 2
    assert "the same geometry; 524288 bytes in 1 runs" in found["conversion"].text
    assert found["plan"].values["bytes"] == 63 * 524288  # 999 tokens, in whole blocks
    pulled = found["pull"].values
    assert pulled["bytes"] == 4 << 20
    assert pulled["tokens"] == 127
    assert pulled["verified"] is True
    assert pulled["bytes_per_s"] > 0
    assert pulled["release_ms"] > 0


def test_what_is_pulled_is_compared(at_rest: Listener) -> None:
    """One byte of P's memory that changes after it was leased is found."""
    region = at_rest._memory.region
    view = np.ctypeslib.as_array((np.ctypeslib.as_ctypes_type(np.uint8) * region.size).from_address(region.address))

    class Corrupting(HttpServer):
        def ask(self, path: str, body: dict[str, Any] | None = None) -> Answer:
            answer = super().ask(path, body)
            view[524288 + 1000] ^= 1  # in block 1, after the lease's checksums were taken
            return answer

    name, text = only_failure(visit_to(at_rest.address, server=Corrupting))
    assert name == "pull"
    assert "checksum: " in text
    assert "checksums of what has arrived differ from those of what was leased" in text


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (Sizes(2), "TP 1 to 2"),
        (Sizes(1, 32), "block size 16 to 32"),
        (Sizes(4, 64), "TP 1 to 4, block size 16 to 64"),
    ],
)
def test_other_decode_engines_pull_too(at_rest: Listener, sizes: Sizes, said: str) -> None:
    report = visit_to(at_rest.address, Wishes(sizes, tokens=300, pull_bytes=1 << 20))
    assert report.passed
    found = {line.name: line.verdict for line in report.lines}
    assert said in found["conversion"].text
    assert found["pull"].values["verified"] is True


def test_a_prompt_that_p_has_no_blocks_for_is_not_predicted(at_rest: Listener) -> None:
    report = visit_to(at_rest.address, Wishes(tokens=5000, pull_bytes=1 << 20))
    found = {line.name: line.verdict for line in report.lines}
    assert found["plan"].outcome is Outcome.WARN
    assert "a prompt of 5000 tokens takes 313 blocks; the prefill engine has 129; not predicted" in found["plan"].text
    assert found["pull"].outcome is Outcome.OK


def test_a_wrong_port() -> None:
    name, text = only_failure(visit_to(f"{HOST}:{free_port()}"))
    assert name == "peer"
    assert "refused" in text
    assert "is this its HTTP port?" in text


def test_a_server_without_the_connector(at_rest: Listener) -> None:
    class Plain(HttpServer):
        def ask(self, path: str, body: dict[str, Any] | None = None) -> Answer:
            answer = super().ask(path, None if body is None else body | {"prompt": [1]})
            at_rest._leases.cancel_all()
            return Answer({**answer.body, "kv_transfer_params": None}, answer.seconds, None)

    name, text = only_failure(visit_to(at_rest.address, server=Plain))
    assert name == "lease"
    assert "has answered without kv_transfer_params: it must be a vLLM server with the PDConnector" in text


def test_another_transport(at_rest: Listener) -> None:
    visit = Visit(HttpServer(base_url(at_rest.address), None, 20.0), settings(), HOST, "rdma", SMALL)
    name, text = only_failure(report_of(visit))
    assert name == "geometry"
    assert "transport tcp, and this side's is rdma: start both with the same protocol" in text


def test_a_p_that_may_not_be_contacted(at_rest: Listener) -> None:
    report = visit_to(at_rest.address, allowed_peers=["10.0.0.0/8"])
    at_rest._leases.cancel_all()  # it may not be told to
    name, text = only_failure(report)
    assert name == "handshake"
    assert "may not be contacted: allowed_peers names 10.0.0.0/8" in text


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The address of a listener with a secret, and the secret's file."""
    file = secret(tmp_path_factory.mktemp("secret") / "right", "0123456789abcdef")
    listener = Listener(settings(secret_file=file), HOST, "tcp", 0)
    yield listener.address, file
    listener.close()


def test_the_right_secret(guarded: tuple[str, str]) -> None:
    address, file = guarded
    report = visit_to(address, secret_file=file)
    assert report.passed
    assert "authenticated and encrypted" in {line.name: line.verdict.text for line in report.lines}["handshake"]


@pytest.mark.parametrize("ours", ["", "another secret of 16 bytes"])
def test_a_wrong_secret(guarded: tuple[str, str], tmp_path: Path, ours: str) -> None:
    config: dict[str, Any] = {"secret_file": secret(tmp_path / "wrong", ours)} if ours else {}
    name, text = only_failure(visit_to(guarded[0], **config))
    assert name == "handshake"
    assert "secret" in text


def killed_when(dies: Callable[[str], bool]) -> type[HttpServer]:
    """A server whose process is killed as soon as it has answered a question for which ``dies`` says so."""

    class Dying(HttpServer):
        def ask(self, path: str, body: dict[str, Any] | None = None) -> Answer:
            answer = super().ask(path, body)
            if dies(path if body is None else f"{path} {len(body['prompt'])}"):
                for process in multiprocessing.active_children():
                    if process.name == "pd-doctor-listener":
                        process.kill()
                        process.join()
            return answer

    return Dying


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("question", "fails", "said"),
    [
        pytest.param("/v1/models", "lease", "does not answer", marks=pytest.mark.slow),
        pytest.param("/v1/completions 8", "handshake", "did not answer 'hello'", marks=pytest.mark.slow),
        ("/v1/completions 32", "pull", ""),
    ],
)
def test_a_p_that_dies(question: str, fails: str, said: str) -> None:
    with serve_apart(settings(), HOST, "tcp") as address:
        server = killed_when(lambda asked: asked == question)
        report = visit_to(address, server=server, pull_timeout_s=10.0)
    name, text = only_failure(report)
    assert name == fails
    assert said in text
    if fails == "pull":
        assert text.startswith(("read: ", "unreachable: ", "unconfirmed: "))


@pytest.mark.thorough
def test_a_listener_that_does_not_start_is_a_finding() -> None:
    with pytest.raises(CheckFailed, match=r"the second process did not start: .*192\.0\.2\.1"):  # noqa: SIM117
        with serve_apart(settings(), "192.0.2.1", "tcp"):
            pytest.fail("it cannot start there")


def test_a_listener_refuses_what_it_does_not_serve(at_rest: Listener) -> None:
    server = HttpServer(base_url(at_rest.address), None, 20.0)
    leg = {"kv_transfer_params": {"do_remote_decode": True}}
    for path, body in (
        ("/v1/chat/completions", {"prompt": [1], **leg}),
        ("/v1/completions", {"prompt": [1]}),
        ("/v1/completions", {"prompt": [], **leg}),
        ("/v1/completions", {"prompt": ["x"], **leg}),
        ("/v1/completions", {"prompt": [1] * 4000, **leg}),
    ):
        with pytest.raises(CheckFailed, match="status 400"):
            server.ask(path, body)
    with pytest.raises(CheckFailed, match="status 404"):
        server.ask("/metrics")
