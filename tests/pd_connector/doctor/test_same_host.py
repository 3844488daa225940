"""Which transport two processes of a machine use: real processes, whose GPU memory is that of fake drivers."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from pd_connector.config import ConfigError, parse_config
from pd_connector.doctor import __main__ as module
from pd_connector.doctor import same_host
from pd_connector.doctor.findings import CheckFailed, CheckWarned
from pd_connector.doctor.machine import Machine
from pd_connector.doctor.same_host import SameHost
from pd_connector.doctor.software import Software
from tests.support.engine.ipc_engines import FakeIpcEngine
from tests.support.engine.sharing_processes import FakeGpu, Gpu
from transfer.engine.cuda_ipc import CudaIpcEngine

SIZE = 1 << 20
SECRET = "a secret of many letters"


class Reader(FakeGpu):
    """A reader whose driver is told what to answer when a handle is opened."""

    def __init__(self, open_error: int) -> None:
        self.open_error = open_error

    def engine(self, *, is_read: bool) -> CudaIpcEngine:
        engine = super().engine(is_read=is_read)
        assert isinstance(engine, FakeIpcEngine)
        engine.driver.open_error = 0 if is_read else self.open_error
        return engine


class Unshared(FakeGpu):
    """Memory without handles."""

    def engine(self, *, is_read: bool) -> CudaIpcEngine:
        engine = super().engine(is_read=is_read)
        assert isinstance(engine, FakeIpcEngine)
        engine.driver.has_handles = False
        return engine


class Damaging(FakeGpu):
    """Memory of which the last byte is another one when it is compared."""

    def allocate(self, size: int) -> torch.Tensor:
        memory = super().allocate(size)
        memory.cpu = lambda: torch.cat([memory[:-1], memory[-1:] + 1])
        return memory


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_CONNECTOR_SECRET", SECRET)


def on(gpus: Any, size: int = SIZE, **changes: Any) -> SameHost:
    config = parse_config({"host": "127.0.0.1", "protocol": "tcp"} | changes)
    return SameHost(config, gpus, size, by_auto="protocol" not in changes)


@pytest.mark.thorough
@pytest.mark.usefixtures("secret")
@pytest.mark.parametrize(
    "gpus",
    [
        FakeGpu(),
        pytest.param(
            Gpu(),
            marks=(
                pytest.mark.cuda,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ),
        ),
    ],
    ids=["fake", "GPU"],
)
def test_what_maps_memory_says_how_fast_it_is_read(gpus: Any) -> None:
    said = on(gpus).check()
    assert re.fullmatch(
        r"two processes here use CUDA IPC: 1\.0 MB of the same GPU in [\d.]+ ms, [\d.]+ GB/s, all bytes equal", said
    )


@pytest.mark.thorough
@pytest.mark.usefixtures("secret")
@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        (Reader(801), "cuIpcOpenMemHandle_v2 answers 801 .*MIG"),
        (Reader(217), "cuIpcOpenMemHandle_v2 answers 217 .*nvidia-smi topo"),
        (Unshared(), "CUDA IPC does not start: EngineStartError: cuIpcGetMemHandle answers 1 .*sleep mode"),
    ],
    ids=["MIG", "no way between GPUs", "no handles"],
)
def test_what_does_not_is_a_warning_with_the_reason(gpus: FakeGpu, said: str) -> None:
    with pytest.raises(CheckWarned, match=f"^two processes here use tcp, and not CUDA IPC: .*{said}"):
        on(gpus).check()


@pytest.mark.thorough
@pytest.mark.usefixtures("secret")
def test_bytes_that_are_wrong_are_a_failure() -> None:
    with pytest.raises(CheckFailed, match=r"would use CUDA IPC: .*, 1 bytes wrong$") as failure:
        on(Damaging()).check()
    assert failure.type is CheckFailed


def test_what_the_settings_exclude_is_said_and_not_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PD_CONNECTOR_SECRET", raising=False)
    assert on(None).check() == "two processes here use tcp: CUDA IPC takes a secret (secret_file)"
    assert "use tcp, as protocol says; auto would try CUDA IPC" in on(None, protocol="tcp").check()
    with pytest.raises(ConfigError, match="cannot be read"):
        on(None, secret_file=str(tmp_path / "nowhere")).check()


@pytest.mark.parametrize("is_there", [True, False])
def test_it_is_checked_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, is_there: bool
) -> None:
    monkeypatch.setattr(Software, "checks", [])
    monkeypatch.setattr(Machine, "checks", [])
    monkeypatch.setattr(module, "installed", lambda _: None)
    monkeypatch.setattr(module, "_transfer_engine", lambda config: config.protocol)
    with monkeypatch.context() as patched:  # and not while vLLM is imported
        patched.setattr(torch.cuda, "is_available", lambda: is_there)
        assert same_host.has_gpu() is is_there
    monkeypatch.setattr(module, "has_gpu", lambda: is_there)
    monkeypatch.delenv("PD_CONNECTOR_SECRET", raising=False)
    assert module.main(["--config", '{"host": "127.0.0.1"}']) == 0
    assert ("ok   same host: two processes here use tcp: " in capsys.readouterr().out) is is_there


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError, ValueError])
def test_without_a_torch_that_can_be_imported_there_is_none(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """It raises ValueError without CUDA's libraries, and RuntimeError for torch_npu without CANN's."""

    def refuse(name: str) -> NoReturn:
        raise error(name)

    monkeypatch.setattr(same_host, "importlib", SimpleNamespace(import_module=refuse))
    assert not same_host.has_gpu()
