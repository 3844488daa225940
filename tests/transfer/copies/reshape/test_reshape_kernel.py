"""Copies by the kernel: every byte of every run and nothing beside it.

By Triton's interpreter on the CPU, and compiled on a GPU if there is one.

Covers: transfer.copies.reshape.run_kernel, transfer.copies.reshape.storages.
"""

import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from layout.copies import EMPTY
from pd_connector.worker import remote_reader
from tests.support.devices.kernel_devices import KERNEL_DEVICES, compiled_kernel, kernel_marks, kernel_on, triton
from tests.support.devices.run_batches import Batch, batches, copies_of
from tests.support.memory import Bytes, noise
from transfer.copies.reshape import reshape_kernel, reshape_torch
from transfer.copies.reshape.reshape_kernel import (
    _RUN_WORDS,
    _TILE_WORDS,
    _WORD_BYTES,
    PIECE_BYTES,
    KernelCopier,
    KernelUnusable,
)
from transfer.copies.reshape.reshape_torch import SideStream, TensorCopier

pytestmark = kernel_marks


@pytest.fixture(scope="module", params=KERNEL_DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    with kernel_on(request.param) as device:
        yield device


class Launches:
    """Stands before the kernel: what it was launched with."""

    def __init__(self, copier: KernelCopier) -> None:
        self.kernel, copier._kernel._kernel = copier._kernel._kernel, self
        self.options: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.options.append({"programs": grid[0], **options})
            self.kernel[grid](*arguments, **options)

        return launch


class StreamOfADevice(SideStream):
    """Has a stream on the CPU, too, where otherwise nothing needs to be brought to a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._module, self._stream = self._module or MagicMock(), self._stream or MagicMock()


class OnDevice:
    """Bytes in the memory of a device."""

    def __init__(self, content: Bytes, device: torch.device) -> None:
        self.tensor = torch.from_numpy(content).to(device)
        self.address = self.tensor.data_ptr()

    @property
    def content(self) -> Bytes:
        content: Bytes = self.tensor.cpu().numpy()
        return content


def copier_of(*memories: OnDevice) -> tuple[KernelCopier, Launches]:
    copier = KernelCopier([memory.tensor for memory in memories])
    return copier, Launches(copier)


@pytest.mark.thorough
@settings(deadline=None, max_examples=20)
@given(batches())
def test_random_runs_equal_slices_in_numpy(device: torch.device, batch: Batch) -> None:
    source = OnDevice(noise(batch.source_bytes + 16, 1), device)
    expected = [noise(size + 16, 2 + number) for number, size in enumerate(batch.target_bytes)]
    targets = [OnDevice(target.copy(), device) for target in expected]
    for target, to, start, size in batch.runs:
        expected[target][to : to + size] = source.content[start : start + size]
    copier, _ = copier_of(source, *targets)
    copier(
        copies_of([(targets[target].address + to, source.address + at, size) for target, to, at, size in batch.runs])
    )
    for memory, wanted in zip(targets, expected, strict=True):
        np.testing.assert_array_equal(memory.content, wanted)


@pytest.mark.parametrize(
    ("size", "step", "word", "words"),
    [
        (256, 512, "int64", 32),
        (1024, 1032, "int64", 128),
        (4096, 4096, "int64", 512),
        (60, 64, "int32", 32),
        (7, 8, "int8", 32),
        (2000, 2001, "int8", 512),
    ],
)
def test_one_launch_copies_all_runs_in_the_widest_words(
    device: torch.device, size: int, step: int, word: str, words: int
) -> None:
    count = 40
    source, expected = OnDevice(noise(count * step), device), noise(count * step, 1)
    target = OnDevice(expected.copy(), device)
    copier, launches = copier_of(source, target)
    starts = [step * number for number in range(count)]
    for to, start in zip(reversed(starts), starts, strict=True):
        expected[to : to + size] = source.content[start : start + size]
    runs = zip(reversed(starts), starts, strict=True)
    copier(copies_of([(target.address + to, source.address + start, size) for to, start in runs]))
    np.testing.assert_array_equal(target.content, expected)
    (launch,) = launches.options
    assert (launch["WORD"], launch["WORDS"]) == (getattr(triton.language, word), words)
    assert launch["programs"] == -(-count // launch["RUNS"])


def test_a_long_run_is_cut_and_none_is_lost(device: torch.device) -> None:
    size = 3 * PIECE_BYTES + 24
    source, target = OnDevice(noise(size + 64), device), OnDevice(np.zeros(size + 64, np.uint8), device)
    copier, launches = copier_of(source, target)
    copier(copies_of([(target.address + 8, source.address + 16, size), (target.address, source.address, 8)]))
    np.testing.assert_array_equal(target.content[8 : 8 + size], source.content[16 : 16 + size])
    np.testing.assert_array_equal(target.content[:8], source.content[:8])
    assert not target.content[8 + size :].any()
    assert launches.options[0]["RUNS"] * launches.options[0]["programs"] >= 5


def test_runs_go_between_the_storages_of_all_tensors_whatever_part_of_them_is_shown(device: torch.device) -> None:
    source, target = OnDevice(noise(4096), device), OnDevice(np.zeros(4096, np.uint8), device)
    copier = KernelCopier([source.tensor.view(torch.float32)[4:6]], [target.tensor.view(torch.int8)[:1]])
    copier(copies_of([(target.address + 4000, source.address + 8, 96)]))
    np.testing.assert_array_equal(target.content[4000:], source.content[8:104])


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        ((4090, 0, 8), "the destination of non-empty copy 1 of 2, 8 bytes at"),
        ((0, 4095, 2), "the source of non-empty copy 1 of 2, 2 bytes at"),
        ((-1, 0, 2), "the destination of non-empty copy 1 of 2"),
        ((0, 0, -1), "copy 1 of 2 has a negative size: -1 bytes"),
        ((0, 0, 1 << 62), "the destination of non-empty copy 1 of 2"),
    ],
)
def test_nothing_is_copied_if_a_run_leaves_the_storages(
    device: torch.device, run: tuple[int, int, int], reason: str
) -> None:
    source, target = OnDevice(noise(4096), device), OnDevice(np.zeros(4096, np.uint8), device)
    copier, launches = copier_of(source, target)
    right = (target.address, source.address, 8)
    wrong = (target.address + run[0], source.address + run[1], run[2])
    with pytest.raises(ValueError, match=reason):
        copier(copies_of([right, wrong]))
    assert not launches.options
    assert not target.content.any()


@pytest.mark.parametrize("copier", [KernelCopier, TensorCopier])
def test_lists_of_runs_arrive_if_no_memory_can_be_pinned(
    device: torch.device, copier: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", Mock(side_effect=RuntimeError("CUDA error: out of memory")))
    for module in (reshape_kernel, reshape_torch):
        monkeypatch.setattr(module, "SideStream", StreamOfADevice)
    source, target = OnDevice(noise(64 * 512), device), OnDevice(np.zeros(64 * 512, np.uint8), device)
    copy = copier([source.tensor, target.tensor])
    for _ in range(2):
        copy(copies_of([(target.address + 512 * n, source.address + 512 * (63 - n), 512) for n in range(64)]))
    np.testing.assert_array_equal(target.content.reshape(64, 512), source.content.reshape(64, 512)[::-1])
    (said,) = caplog.messages
    assert "are slower: no memory can be pinned: CUDA error: out of memory" in said


def test_nothing_is_launched_for_nothing(device: torch.device) -> None:
    source = OnDevice(noise(64), device)
    copier, launches = copier_of(source)
    copier(EMPTY)
    copier(copies_of([(source.address, source.address, 0)]))
    assert not launches.options


def test_a_kernel_that_copies_wrongly_or_not_at_all_is_not_used(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = OnDevice(noise(64), device).tensor
    right = reshape_kernel._write

    def cut_short(*arguments: Any) -> None:
        right(*arguments)
        arguments[-1][2, -1] -= 1

    def all_alike(_low: int, _high: int, size: tuple[int, ...], **options: Any) -> torch.Tensor:
        return torch.zeros(size, **options)

    monkeypatch.setattr(reshape_kernel, "_write", cut_short)
    monkeypatch.setattr(torch, "randint", all_alike)  # what is not copied must not be right by chance
    with pytest.raises(KernelUnusable, match="what it copied at start is not what it was given"):
        KernelCopier([source])
    monkeypatch.setattr(importlib, "import_module", missing)
    assert remote_reader._kernel_copier([source], source) is None
    assert "caches are reshaped by operators, which is slower than by a kernel: ImportError: no triton" in caplog.text


@pytest.mark.thorough
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_variant_compiles_for_gpus_that_are_not_here(
    capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton.backends.nvidia", reason="this build of Triton has no compiler for CUDA")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))  # of what was compiled before
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", capability, 32)
    arguments = {"table": "*i64", "runs": "i32", "longest": "i32"}
    for width, words in itertools.product(_WORD_BYTES, _RUN_WORDS):
        constants = {"WORD": getattr(triton.language, f"int{8 * width}"), "RUNS": _TILE_WORDS // words, "WORDS": words}
        signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
        source = triton.compiler.ASTSource(compiled_kernel, signature, constants)
        compiled = triton.compile(source, target=target)
        assert f".target sm_{capability}" in compiled.asm["ptx"]
        assert compiled.asm["cubin"]


def missing(name: str) -> Any:
    raise ImportError(f"no {name.partition('.')[0]}")
