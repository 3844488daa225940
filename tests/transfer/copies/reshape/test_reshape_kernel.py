"""Copies by the kernel: every byte of every run and nothing beside it, run by Triton's interpreter on the CPU.

Covers: transfer.copies.reshape.run_kernel, transfer.copies.reshape.storages.
"""

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from layout.copies import EMPTY
from pd_connector.worker import remote_reader
from tests.support.devices.interpreted_kernel import interpreted, triton
from tests.support.devices.run_batches import Batch, address, batches, copies_of, part_of
from tests.support.memory import Bytes, noise
from transfer.copies.reshape import reshape_kernel
from transfer.copies.reshape.reshape_kernel import PIECE_BYTES, KernelCopier, KernelUnusable

pytestmark = interpreted


class Launches:
    """Stands before the kernel: what it was launched with."""

    def __init__(self, copier: KernelCopier) -> None:
        self.kernel, copier._kernel = copier._kernel, self
        self.options: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.options.append({"programs": grid[0], **options})
            self.kernel[grid](*arguments, **options)

        return launch


def copier_of(*memories: Bytes) -> tuple[KernelCopier, Launches]:
    copier = KernelCopier([torch.from_numpy(memory) for memory in memories])
    return copier, Launches(copier)


@pytest.mark.thorough
@settings(deadline=None, max_examples=60)
@given(batches())
def test_random_runs_equal_slices_in_numpy(batch: Batch) -> None:
    source = noise(batch.source_bytes + 16, 1)
    targets = [noise(size + 16, 2 + number) for number, size in enumerate(batch.target_bytes)]
    expected = [target.copy() for target in targets]
    for target, to, start, size in batch.runs:
        expected[target][to : to + size] = source[start : start + size]
    copier, _ = copier_of(source, *targets)
    copier(
        copies_of([(address(targets[target]) + to, address(source) + at, size) for target, to, at, size in batch.runs])
    )
    for memory, wanted in zip(targets, expected, strict=True):
        np.testing.assert_array_equal(memory, wanted)


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
def test_one_launch_copies_all_runs_in_the_widest_words(size: int, step: int, word: str, words: int) -> None:
    count = 40
    source, target = noise(count * step), noise(count * step, 1)
    expected = target.copy()
    copier, launches = copier_of(source, target)
    starts = [step * number for number in range(count)]
    for to, start in zip(reversed(starts), starts, strict=True):
        expected[to : to + size] = source[start : start + size]
    runs = zip(reversed(starts), starts, strict=True)
    copier(copies_of([(address(target) + to, address(source) + start, size) for to, start in runs]))
    np.testing.assert_array_equal(target, expected)
    (launch,) = launches.options
    assert (launch["WORD"], launch["WORDS"]) == (getattr(triton.language, word), words)
    assert launch["programs"] == -(-count // launch["RUNS"])


def test_a_long_run_is_cut_and_none_is_lost() -> None:
    size = 3 * PIECE_BYTES + 24
    source, target = noise(size + 64), np.zeros(size + 64, np.uint8)
    copier, launches = copier_of(source, target)
    copier(copies_of([(address(target) + 8, address(source) + 16, size), (address(target), address(source), 8)]))
    np.testing.assert_array_equal(target[8 : 8 + size], source[16 : 16 + size])
    np.testing.assert_array_equal(target[:8], source[:8])
    assert not target[8 + size :].any()
    assert launches.options[0]["RUNS"] * launches.options[0]["programs"] >= 5


def test_runs_go_between_the_storages_of_all_tensors_whatever_part_of_them_is_shown() -> None:
    source, target = noise(4096), np.zeros(4096, np.uint8)
    copier = KernelCopier([part_of(source, torch.float32, 4, 6)], [part_of(target, torch.int8, 0, 1)])
    copier(copies_of([(address(target) + 4000, address(source) + 8, 96)]))
    np.testing.assert_array_equal(target[4000:], source[8:104])


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
def test_nothing_is_copied_if_a_run_leaves_the_storages(run: tuple[int, int, int], reason: str) -> None:
    source, target = noise(4096), np.zeros(4096, np.uint8)
    copier, launches = copier_of(source, target)
    right = (address(target), address(source), 8)
    wrong = (address(target) + run[0], address(source) + run[1], run[2])
    with pytest.raises(ValueError, match=reason):
        copier(copies_of([right, wrong]))
    assert not launches.options
    assert not target.any()


def test_nothing_is_launched_for_nothing() -> None:
    source = noise(64)
    copier, launches = copier_of(source)
    copier(EMPTY)
    copier(copies_of([(address(source), address(source), 0)]))
    assert not launches.options


def test_a_kernel_that_copies_wrongly_or_not_at_all_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = torch.from_numpy(noise(64))
    right = reshape_kernel._write

    def cut_short(*arguments: Any) -> None:
        right(*arguments)
        arguments[-1][2, -1] -= 1

    monkeypatch.setattr(reshape_kernel, "_write", cut_short)
    with pytest.raises(KernelUnusable, match="what it copied at start is not what it was given"):
        KernelCopier([source])
    monkeypatch.setattr(importlib, "import_module", missing)
    assert remote_reader._kernel_copier([source], source) is None
    assert "caches are reshaped by operators, which is slower than by a kernel: ImportError: no triton" in caplog.text


def missing(name: str) -> Any:
    raise ImportError(f"no {name.partition('.')[0]}")
