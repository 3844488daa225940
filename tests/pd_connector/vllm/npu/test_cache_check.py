"""What the check of attention operators notices, with operators of torch on the CPU.

Covers: pd_connector.vllm.paged_batches.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pd_connector.vllm.cross_layer_tensors import allocate_cross_layer
from pd_connector.vllm.npu.cache_check import PartShape, difference, difference_at_end
from pd_connector.vllm.paged_batches import Batch, Parts, batches, same_bits, varied

TOKENS = 16
GQA = (PartShape((TOKENS, 2, 8), torch.float32), PartShape((TOKENS, 2, 8), torch.float32))
MLA = (PartShape((TOKENS, 1, 32), torch.bfloat16), PartShape((TOKENS, 1, 4), torch.bfloat16))


class Operators:
    """Operators that follow the strides that they are given."""

    def write(self, cache: Parts, batch: Batch, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        for part in cache:
            new = torch.randn(batch.tokens, *part.shape[2:], generator=random).to(part.dtype)
            part[batch.slots // TOKENS, batch.slots % TOKENS] = new

    def attend(self, cache: Parts, batch: Batch, seed: int) -> list[torch.Tensor]:
        outputs = []
        for part in cache:
            tokens = part[batch.block_table.long()].flatten(1, 2)
            sums = [row[:length].float().sum(0) for row, length in zip(tokens, batch.sequence_lengths, strict=True)]
            outputs.append(torch.stack(sums) * (seed + 1))
        return outputs


class Ignoring(Operators):
    """Operators that take the blocks of a cache to be dense."""

    def __init__(self, *, writing: bool, attending: bool) -> None:
        self.writing, self.attending = writing, attending

    def _as_dense(self, cache: Parts) -> Parts:
        return [part.as_strided(part.shape, (part[0].numel(), *part.stride()[1:])) for part in cache]

    def write(self, cache: Parts, batch: Batch, seed: int) -> None:
        super().write(self._as_dense(cache) if self.writing else cache, batch, seed)

    def attend(self, cache: Parts, batch: Batch, seed: int) -> list[torch.Tensor]:
        return super().attend(self._as_dense(cache) if self.attending else cache, batch, seed)


class Copying(Operators):
    """Operators that make a cache dense first, as vllm-ascend 0.23 does; ``part`` alone, if that is given."""

    def __init__(self, part: int | None = None) -> None:
        self.part = part

    def attend(self, cache: Parts, batch: Batch, seed: int) -> list[torch.Tensor]:
        wanted = range(len(cache)) if self.part is None else (self.part,)
        return super().attend(
            [part.contiguous() if number in wanted else part for number, part in enumerate(cache)], batch, seed
        )


class Refusing(Operators):
    """Operators that raise on a view."""

    def write(self, cache: Parts, batch: Batch, seed: int) -> None:
        for part in cache:
            if not part.is_contiguous():
                raise RuntimeError("view size is not compatible")
        super().write(cache, batch, seed)


class Scribbling(Operators):
    """Operators that write a byte of their cache while they attend."""

    def attend(self, cache: Parts, batch: Batch, seed: int) -> list[torch.Tensor]:
        outputs = super().attend(cache, batch, seed)
        if not cache[0].is_contiguous() and batch.longest_query == 1:
            cache[0][4, 0, 0, 0] += 1
        return outputs


class Wrapping(Operators):
    """Operators that count the items from the start of a cache to a block modulo ``LIMIT``."""

    LIMIT = 1 << 14

    def __init__(self, *, writing: bool, attending: bool) -> None:
        self.writing, self.attending = writing, attending

    def write(self, cache: Parts, batch: Batch, seed: int) -> None:
        slots = batch.slots % (self.LIMIT // cache[0].stride(0) * TOKENS)
        super().write(cache, replace(batch, slots=slots) if self.writing else batch, seed)

    def attend(self, cache: Parts, batch: Batch, seed: int) -> list[torch.Tensor]:
        table = batch.block_table % (self.LIMIT // cache[0].stride(0))
        return super().attend(cache, replace(batch, block_table=table) if self.attending else batch, seed)


class Clones(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Counts the bytes of dense copies."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.clone.default:
            self.bytes += out.nbytes
        return out


class Watch:
    """Takes the bytes of dense copies for those that a device would lack."""

    def taken_by(self, call: Callable[[], object]) -> int:
        clones = Clones()
        with clones:
            call()
        return clones.bytes


def found(operators: Operators, parts: tuple[PartShape, ...] = GQA) -> str:
    return difference(operators, parts, TOKENS, torch.device("cpu"), Watch())


@pytest.mark.parametrize("parts", [GQA, MLA])
def test_operators_that_follow_strides_pass(parts: tuple[PartShape, ...]) -> None:
    assert found(Operators(), parts) == ""


@pytest.mark.parametrize("parts", [GQA, MLA])
@pytest.mark.parametrize(
    ("writing", "attending", "what"),
    [
        (True, False, "after writing in step 0 the cache holds other bytes"),
        (False, True, "the attention output of layer 0 in step 0 differs"),
        (True, True, "after writing in step 0 the cache holds other bytes"),
    ],
)
def test_operators_that_ignore_the_block_stride_are_noticed(
    parts: tuple[PartShape, ...], writing: bool, attending: bool, what: str
) -> None:
    assert found(Ignoring(writing=writing, attending=attending), parts) == what


@pytest.mark.parametrize("part", [None, 0, 1])
@pytest.mark.parametrize("parts", [GQA, MLA])
def test_operators_that_copy_any_part_are_noticed(parts: tuple[PartShape, ...], part: int | None) -> None:
    assert found(Copying(part), parts).startswith("attention in step 0 takes ")


def test_operators_that_refuse_the_view_are_noticed() -> None:
    assert found(Refusing()) == "writing raises RuntimeError: view size is not compatible"


def test_operators_that_write_where_they_read_are_noticed() -> None:
    assert found(Scribbling()) == "attention changed the cache"


def test_operators_that_fail_on_dense_caches_too_are_an_error() -> None:
    class Broken(Operators):
        def write(self, cache: Parts, batch: Batch, seed: int) -> None:
            raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        found(Broken())


# On the last blocks of caches that would serve


def served(blocks: int, parts: tuple[PartShape, ...] = GQA) -> list[Parts]:
    return list(allocate_cross_layer(parts, ("l0", "l1", "l2", "l3"), blocks, "cpu").values())


@pytest.mark.parametrize("parts", [GQA, MLA])
@pytest.mark.parametrize("blocks", [3, 7, 64])
def test_operators_that_count_on_pass_at_the_end_and_leave_zeros(blocks: int, parts: tuple[PartShape, ...]) -> None:
    layers = served(blocks, parts)
    assert difference_at_end(Operators(), layers, TOKENS) == ""
    assert not any(part.any() for layer in layers for part in layer)


@pytest.mark.parametrize(
    ("writing", "attending", "what"),
    [
        (True, False, "after writing in step 0 the cache holds other bytes"),
        (False, True, "the attention output of layer 0 in step 0 differs"),
        (True, True, "after writing in step 0 the cache holds other bytes"),
    ],
)
def test_operators_that_count_too_few_items_are_noticed_only_there(
    *, writing: bool, attending: bool, what: str
) -> None:
    operators = Wrapping(writing=writing, attending=attending)
    assert found(operators) == ""
    assert difference_at_end(operators, served(64), TOKENS) == what


def test_operators_that_write_into_the_blocks_of_other_layers_are_noticed_there() -> None:
    class Overrunning(Operators):
        def write(self, cache: Parts, batch: Batch, seed: int) -> None:
            super().write(cache, batch, seed)
            for part in cache:
                if not part.is_contiguous():
                    part[-1].as_strided((part[0].numel() + 1,), (1,))[-1] = 1

    assert difference_at_end(Overrunning(), served(64), TOKENS).startswith("after writing in step 0 ")


def test_the_last_block_is_among_them() -> None:
    seen: list[int] = []

    class Noting(Operators):
        def write(self, cache: Parts, batch: Batch, seed: int) -> None:
            super().write(cache, batch, seed)
            if not cache[0].is_contiguous():
                seen.extend((batch.slots // TOKENS).tolist())

    assert difference_at_end(Noting(), served(64), TOKENS) == ""
    assert max(seen) == 63


def test_the_steps_write_each_token_of_both_sequences_once() -> None:
    steps = list(batches(TOKENS))
    slots = torch.cat([step.slots for step in steps]).tolist()
    assert len(set(slots)) == len(slots) == int(steps[-1].sequence_lengths.sum())
    for step in steps:
        assert step.tokens == len(step.slots)


def test_contents_vary_by_place_and_bits_are_compared() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        values = varied((3, 7, 16), dtype)
        assert same_bits(values, values.clone())
        other = values.clone()
        other[2, 6, 15] += 1
        assert not same_bits(values, other)
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
