"""The image for CPUs, made without a container engine: its instructions, done in a new Debian root.

They take packages from the archive of Debian and from the index of pip, minutes and 5 GB of disk.
"""

import json
import os
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from examples.quickstart.servers import Server, Servers
from tests.support.deploy.dockerfiles import dockerfile, read_instructions
from tests.support.deploy.image_roots import ImageRoot, build_image, lacks_for_roots
from tests.support.e2e.client import MODEL_NAME, Client
from tests.support.e2e.models import DEFAULT_MODEL, write_model
from tests.support.e2e.pair import make_prompt
from tests.support.process import free_ports
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(3600)

INDEX = "https://download.pytorch.org/whl/cpu"  # of the Dockerfile
MODEL = "/models/tiny"
BUILD_TOOLS = ("cc", "gcc", "g++", "clang", "make", "cmake", "git", "pip", "pip3", "dpkg-buildpackage")
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


def torch_index() -> str:
    """As for make, TORCH_INDEX names one. Else PyTorch's own, and where it cannot be reached, pip's alone must do."""
    with suppress(OSError), urllib.request.urlopen(f"{INDEX}/", timeout=20):
        return os.environ.get("TORCH_INDEX", INDEX)
    return os.environ.get("TORCH_INDEX", "https://pypi.org/simple")


@pytest.fixture(scope="module")
def image() -> Iterator[ImageRoot]:
    if reason := lacks_for_roots():
        pytest.skip(reason)
    directory = Path(tempfile.mkdtemp(prefix="pd-connector-image-"))
    try:
        steps = read_instructions(dockerfile("cpu").read_text())
        yield build_image(steps, directory, {"TORCH_INDEX": torch_index()})
    finally:  # what was mounted, was it for the commands alone
        shutil.rmtree(directory)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = write_model(tmp_path / "model", DEFAULT_MODEL)
    for path in (directory, *directory.iterdir()):
        path.chmod(0o755)  # readable by any user, as what is mounted into a container must be
    return directory


def run(image: ImageRoot, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(image.command(words), capture_output=True, text=True, timeout=300, check=False)


def is_well(image: ImageRoot, server: Server) -> bool:
    """What HEALTHCHECK says of the container of a server."""
    return (
        subprocess.run(image.command_inside(first(server), image.health), capture_output=True, check=False).returncode
        == 0
    )


def first(server: Server) -> int:
    """The process that is the first one in the server's namespace: the child of `unshare`, which a guard started."""

    def child(pid: int) -> int:
        return int(until(Path(f"/proc/{pid}/task/{pid}/children").read_text).split()[0])

    return child(child(server.process_id))


def user_of(pid: int) -> str:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("Uid:")]
    return line.split()[2]


def engine(image: ImageRoot, name: str, role: str, model: Path) -> Server:
    connector: dict[str, object] = {
        "kv_connector": "PDConnector",
        "kv_connector_module_path": "pd_connector",
        "kv_role": role,
        "kv_connector_extra_config": {"host": "127.0.0.1"},
    }
    (port,) = free_ports(1)
    options = ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    options += ["--block-size", "32", "--kv-cache-memory-bytes", str(96 << 20)]
    words = ["vllm", "serve", MODEL, *options, "--kv-transfer-config", json.dumps(connector)]
    return serving(image, name, port, words, {model: MODEL})


def serving(image: ImageRoot, name: str, port: int, words: Sequence[str], files: dict[Path, str]) -> Server:
    command = image.command(words, VARIABLES, files)
    return Server(name, command, url=f"http://127.0.0.1:{port}", log=image.path.parent / f"{name}.log")


@pytest.mark.parametrize(
    "step",
    [
        "FROM ubuntu:24.04",
        "ENTRYPOINT []",
        "RUN --mount=type=bind,target=/src true",
        'RUN ["true"]',
        "HEALTHCHECK NONE",
    ],
)
def test_a_step_of_another_form_is_an_error(step: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not"):
        build_image(read_instructions(step), tmp_path, {})


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    why_not = lacks_for_roots.__wrapped__
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "debootstrap" else name)
    assert "root: debootstrap is missing (Debian: apt-get install debootstrap)" in why_not()
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "making a root needs debootstrap, and to be root: this is another user"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert why_not() == ""


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.scripts
class TestImage:  # all in one run, because the image is made once in each
    def test_p_d_and_the_proxy_serve(self, image: ImageRoot, model: Path) -> None:
        prefill = engine(image, "prefill", "kv_producer", model)
        decode = engine(image, "decode", "kv_consumer", model)
        (port,) = free_ports(1)
        words = ["pd-proxy", "--prefill", prefill.url, "--decode", decode.url, "--port", str(port)]
        proxy = serving(image, "proxy", port, words, {})
        with Servers() as servers:
            servers.start(proxy)
            until(lambda: is_well(image, proxy), within_s=120)
            assert httpx.get(f"{proxy.url}/health", trust_env=False).status_code == 503  # well without P and D
            for server in (prefill, decode):
                servers.start(server)
                assert not is_well(image, server)
            servers.wait_ready([prefill, decode, proxy], timeout_s=600)
            for server in (prefill, decode, proxy):
                assert is_well(image, server)
                assert user_of(first(server)) == "2000"
            router, alone = Client(proxy.url), Client(decode.url)
            for number in range(2):  # the first one is the canary
                prompt = make_prompt(300, f"image {number}")
                answer = router.complete(prompt)
                assert answer.status == 200, answer.body
                assert answer.tokens == alone.compute(prompt).tokens
            assert alone.metrics().value("vllm:pd_pulls_total") > 0
            for client in (router, alone):
                client.close()

    def test_no_build_tools_are_left_in_it(self, image: ImageRoot) -> None:
        assert run(image, "sh", "-c", "command -v vllm pd-proxy pd-doctor healthcheck").returncode == 0
        found = run(image, "sh", "-c", f"for tool in {' '.join(BUILD_TOOLS)}; do command -v $tool; done; true")
        assert (found.returncode, found.stdout) == (0, "")

    def test_nothing_of_this_machine_stays_in_it(self, image: ImageRoot) -> None:
        assert (image.path / "run/machine").exists() is False
        assert list((image.path / "var/lib/apt/lists").iterdir()) == []
        assert not (image.path / "src").exists()

    def test_its_user_cannot_change_it_and_has_a_home(self, image: ImageRoot) -> None:
        said = run(image, "sh", "-c", "id -u; id -g; echo $HOME; pwd").stdout
        assert said.split() == ["2000", "0", "/home/vllm", "/home/vllm"]
        assert run(image, "touch", "/home/vllm/a").returncode == 0
        assert run(image, "touch", "/opt/venv/a").returncode != 0

    def test_vllm_knows_its_version(self, image: ImageRoot) -> None:
        assert run(image, "vllm", "--version").stdout.strip().endswith("+cpu")
