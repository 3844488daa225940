"""Copies between tensors: every byte of every run, nothing beside it, in few operators and bounded memory.

On CPU tensors, where the operators are the same and only the stream is missing. The bytes are checked by numpy.
"""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from layout.copies import EMPTY, Copies
from layout.geometry import Region
from tests.support.devices.run_batches import DTYPES, Batch, ByteRun, address, batches, copies_of, part_of
from tests.support.memory import Bytes, noise
from transfer.copies.reshape.reshape_torch import LARGE_BYTES, SideStream, TensorCopier

CPU = torch.device("cpu")


class Operators(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Counts the operators that run inside, and the bytes that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.gathered: list[int] = []

    def __torch_dispatch__(
        self, operator: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        name = operator.overloadpacket.__name__
        self.calls[name] += 1
        if name == "index_select":
            self.gathered.append(result.numel() * result.element_size())
        return result

    @property
    def moving(self) -> dict[str, int]:
        return {name: self.calls[name] for name in ("index_select", "index_copy_", "copy_") if self.calls[name]}


@pytest.mark.thorough
@settings(deadline=None)
@given(
    batches(),
    st.lists(st.sampled_from(DTYPES), min_size=4, max_size=4),
    st.sampled_from([1, 7, 64, 1000, 1 << 31]),
    st.sampled_from([1, 100, 5000, 1 << 24]),
    st.integers(0, 3),
)
def test_random_runs_equal_slices_in_numpy(
    batch: Batch, dtypes: list[torch.dtype], view_bytes: int, temporary_bytes: int, shift: int
) -> None:
    # ``shift`` moves memory to addresses at which no wide integer may be read.
    source = noise(batch.source_bytes + 16, 1)[shift:]
    targets = [noise(size + 16, 2 + number)[shift:] for number, size in enumerate(batch.target_bytes)]
    expected = [target.copy() for target in targets]
    for target, to, start, size in batch.runs:
        expected[target][to : to + size] = source[start : start + size]
    shown = [part_of(memory, dtype, 1, 3) for memory, dtype in zip([source, *targets], dtypes, strict=False)]
    copier = TensorCopier(shown, temporary_bytes=temporary_bytes, view_bytes=view_bytes)
    copier(
        copies_of([(address(targets[target]) + to, address(source) + at, size) for target, to, at, size in batch.runs])
    )
    for memory, wanted in zip(targets, expected, strict=True):
        np.testing.assert_array_equal(memory, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_what_is_not_a_number_keeps_its_bits(dtype: torch.dtype) -> None:
    source, target = np.full(4096, 0xFF, np.uint8), np.zeros(4096, np.uint8)
    source[::4] = 0xA5  # with a payload, and signalling in the wider types
    copier = TensorCopier([part_of(source, dtype, 0, 4), part_of(target, dtype, 0, 4)])
    copier(copies_of([(address(target) + at, address(source) + at, 64) for at in range(0, 4096, 64)]))
    np.testing.assert_array_equal(target, source)


def heads_of_all_layers(target: Bytes, source: Bytes, head: int, cut: int = 0, apart: int = 1) -> list[ByteRun]:
    """One head of 4 layers x 8 blocks, which lie apart in the cache; of every ``apart`` heads of the source, the first.

    The last is cut.
    """
    places = [layer * 16 * 4 * head + block * 4 * head for layer in range(4) for block in range(8)]
    runs = [(address(target) + place, address(source) + n * apart * head, head) for n, place in enumerate(places)]
    runs[-1] = (*runs[-1][:2], head - cut)
    return runs


@pytest.mark.parametrize("head", [64, 1152, 4096])
def test_all_layers_of_a_region_are_one_gather_and_one_scatter(head: int) -> None:
    source, target = noise(64 * head), noise(4 * 16 * 4 * head, 1)
    copier = TensorCopier([torch.from_numpy(source), torch.from_numpy(target)])
    with Operators() as operators:
        copier(copies_of(heads_of_all_layers(target, source, head, apart=2)))
    assert operators.moving == {"index_select": 1, "index_copy_": 1}
    assert operators.gathered == [32 * head]


@pytest.mark.parametrize("together", [True, False])
def test_sources_that_follow_each_other_are_not_gathered(together: bool) -> None:
    memory = noise(32 * 64 + 4 * 16 * 4 * 64)
    source, target = memory[: 32 * 64], memory[32 * 64 :]
    tensors = [torch.from_numpy(source), torch.from_numpy(target)]
    before = source.copy()
    copier = TensorCopier([torch.from_numpy(memory)] if together else tensors)
    runs = heads_of_all_layers(target, source, 64)
    with Operators() as operators:
        copier(copies_of(runs))
    gather = {"index_select": 1} if together else {}  # the operator must not write to a tensor that holds its source
    assert operators.moving == {**gather, "index_copy_": 1}
    for to, start, size in runs:
        at, first = to - address(target), start - address(source)
        np.testing.assert_array_equal(target[at : at + size], before[first : first + size])


def test_a_run_cut_at_the_end_of_the_buffer_does_not_make_all_rows_narrow() -> None:
    source, target = noise(64 * 4096), noise(4 * 16 * 4 * 4096, 1)
    copier = TensorCopier([torch.from_numpy(source), torch.from_numpy(target)])
    with Operators() as operators:
        copier(copies_of(heads_of_all_layers(target, source, 4096, cut=1000, apart=2)))
    assert operators.moving == {"index_select": 1, "index_copy_": 1, "copy_": 1}
    assert operators.gathered == [31 * 4096]


def test_runs_of_two_sizes_are_moved_together_if_their_rows_are_not_much_narrower() -> None:
    source, target = noise(2 * 64 * 64 * 10), noise(64 * 640 * 2, 1)
    copier = TensorCopier([torch.from_numpy(source), torch.from_numpy(target)])
    sizes = np.tile([384, 256], 64)
    starts = np.cumsum(sizes) - sizes
    with Operators() as operators:
        copier(Copies(address(target) + 2 * starts, address(source) + 2 * starts[::-1].copy(), sizes))
    assert operators.moving == {"index_select": 1, "index_copy_": 1}
    for to, start, size in zip((2 * starts).tolist(), (2 * starts[::-1]).tolist(), sizes.tolist(), strict=True):
        np.testing.assert_array_equal(target[to : to + size], source[start : start + size])


def test_each_region_takes_one_scatter() -> None:
    source, targets = noise(3 * 8 * 128), [noise(16 * 64, number) for number in range(3)]
    copier = TensorCopier(map(torch.from_numpy, (source, *targets)))
    runs = [
        (address(target) + 128 * block, address(source) + (number * 8 + block) * 128, 64)
        for number, target in enumerate(targets)
        for block in range(8)
    ]
    with Operators() as operators:
        copier(copies_of(runs))
    assert operators.moving == {"index_select": 1, "index_copy_": 3}
    for number, target in enumerate(targets):
        np.testing.assert_array_equal(
            target.reshape(8, 2, 64)[:, 0], source.reshape(3, 8, 128)[number, :, :64], err_msg=f"region {number}"
        )


def test_regions_in_one_segment_take_one_scatter() -> None:
    source, memory = noise(3 * 8 * 128), noise(4 * 16 * 64, 1)
    before = memory.copy()
    targets = [memory[number * 16 * 64 + 64 :][: 15 * 64] for number in range(4)]  # with something between them
    segment = Region(address(memory), memory.nbytes)
    copier = TensorCopier(map(torch.from_numpy, targets), [torch.from_numpy(source)], segments=[segment])
    runs = [
        (address(target) + 128 * block, address(source) + (number * 8 + block) * 128, 64)
        for number, target in enumerate(targets[1:])
        for block in range(7)
    ]
    with Operators() as operators:
        copier(copies_of(runs))
    assert operators.moving == {"index_select": 1, "index_copy_": 1}
    for to, start, size in runs:
        at, first = to - address(memory), start - address(source)
        before[at : at + size] = source[first : first + size]
    np.testing.assert_array_equal(memory, before)


def test_temporary_memory_is_bounded() -> None:
    source, target = noise(64 * 1000), np.zeros(64 * 1000, np.uint8)
    order = np.random.default_rng(0).permutation(1000).tolist()
    copier = TensorCopier([torch.from_numpy(source), torch.from_numpy(target)], temporary_bytes=8000)
    with Operators() as operators:
        copier(copies_of([(address(target) + at * 64, address(source) + to * 64, 64) for at, to in enumerate(order)]))
    np.testing.assert_array_equal(target.reshape(1000, 64), source.reshape(1000, 64)[order])
    assert max(operators.gathered) == 100 * 64  # and 1,600 bytes of indices
    assert operators.calls["index_select"] == 10


def test_runs_that_cross_the_end_of_a_view_are_whole() -> None:
    source, target = noise(64 * 64), np.zeros(2 * 64 * 64, np.uint8)
    copier = TensorCopier([torch.from_numpy(source), torch.from_numpy(target)], view_bytes=1600)
    with Operators() as operators:
        copier(copies_of([(address(target) + 128 * n, address(source) + 64 * n, 64) for n in range(64)]))
    np.testing.assert_array_equal(target.reshape(64, 2, 64)[:, 0], source.reshape(64, 64))
    assert not target.reshape(64, 2, 64)[:, 1].any()
    assert operators.moving == {"index_copy_": 6}  # three views of the source, each to two of six of the target


def test_large_runs_go_by_themselves() -> None:
    source, target = noise(LARGE_BYTES + 100), np.zeros(2 * LARGE_BYTES, np.uint8)
    copier = TensorCopier([torch.from_numpy(source), torch.from_numpy(target)])
    with Operators() as operators:
        copier(copies_of([(address(target) + 3, address(source) + 7, LARGE_BYTES)]))
    assert operators.moving == {"copy_": 1}
    np.testing.assert_array_equal(target[3 : 3 + LARGE_BYTES], source[7 : 7 + LARGE_BYTES])
    assert not target[LARGE_BYTES + 3 :].any()


def test_caches_that_share_a_storage_are_one_region() -> None:
    raw, source = noise(8192), noise(2048, 1)
    keys, values = (torch.from_numpy(raw).view(torch.bfloat16)[start : start + 1000] for start in (100, 2000))
    copier = TensorCopier([keys.view(10, 100).T, values, torch.from_numpy(source)])
    with Operators() as operators:
        runs = [(address(raw) + 200 + 4 * 137 * n, address(source) + 64 * n, 64) for n in range(14)]
        copier(copies_of(runs))
    assert operators.moving == {"index_copy_": 1}
    for n in range(14):
        np.testing.assert_array_equal(raw[200 + 548 * n :][:64], source[64 * n :][:64])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 8])
def test_caches_made_in_inference_mode_are_written(count: int, dtype: torch.dtype) -> None:
    with torch.inference_mode():
        cache, staging = torch.zeros(1024, dtype=dtype), torch.ones(1024, dtype=dtype)
    half = 16 * dtype.itemsize
    runs = [(cache.data_ptr() + 2 * half * n, staging.data_ptr() + half * n, half) for n in range(count)]
    TensorCopier([cache, staging])(copies_of(runs))
    expected = [[1.0] * 16 + [0.0] * 16] * count
    np.testing.assert_array_equal(cache.float().numpy()[: 32 * count].reshape(count, 32), expected)


def test_threads_copy_at_once() -> None:
    rows, threads = 512, 4
    source, target = noise(threads * rows * 64), np.zeros(threads * rows * 64, np.uint8)
    copier = TensorCopier([torch.from_numpy(source), torch.from_numpy(target)], temporary_bytes=4096)
    order = np.random.default_rng(0).permutation(threads * rows).reshape(threads, rows)

    def work(mine: npt.NDArray[np.int64]) -> None:
        copier(copies_of([(address(target) + at * 64, address(source) + at * 64, 64) for at in mine.tolist()]))

    workers = [threading.Thread(target=work, args=(mine,)) for mine in order]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    np.testing.assert_array_equal(target, source)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            lambda to, at: (to + 60, at, 8),
            r"destination of non-empty copy 1 of 2, 8 bytes at .* does not lie in one of",
        ),
        (lambda to, at: (to, at - 4, 8), r"source of non-empty copy 1 of 2, 8 bytes at .* not lie in one of the 2"),
        (lambda to, at: (to, at, -8), r"copy 1 of 2 has a negative size: -8"),
    ],
)
def test_a_run_that_leaves_the_memory_is_refused_before_anything_is_copied(
    run: Callable[[int, int], ByteRun], message: str
) -> None:
    memory = noise(1024)
    source, target = memory[64:128], np.zeros(64, np.uint8)
    copier = TensorCopier([torch.from_numpy(source), torch.from_numpy(target)])
    with pytest.raises(ValueError, match=message):
        copier(copies_of([(address(target), address(source), 8), run(address(target), address(source))]))
    assert not target.any()


def test_nothing_to_copy_is_no_error() -> None:
    memory = torch.zeros(64)
    copier = TensorCopier([memory])
    copier(EMPTY)
    copier(copies_of([(memory.data_ptr(), memory.data_ptr() + 8, 0)]))


def test_no_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="must be on one device, not on none"):
        TensorCopier([])


def test_tensors_of_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be on one device, not on \['cpu', 'meta'\]"):
        TensorCopier([torch.zeros(4), torch.zeros(4, device="meta")])


def test_storages_that_overlap_in_part_are_refused() -> None:
    memory = noise(128)
    with pytest.raises(ValueError, match="overlaps"):
        TensorCopier([torch.from_numpy(memory[:96]), torch.from_numpy(memory[32:])])


def test_a_storage_inside_another_is_taken() -> None:
    memory, source = np.zeros(128, np.uint8), noise(64)
    copier = TensorCopier([torch.from_numpy(m) for m in (memory[:32], memory[32:64], memory, source)])
    copier(copies_of([(address(memory) + 16, address(source), 64)]))
    np.testing.assert_array_equal(memory[16:80], source)


def test_on_the_cpu_there_is_no_stream() -> None:
    with pytest.raises(RuntimeError, match="inside"), SideStream(CPU).running():
        raise RuntimeError("inside")
