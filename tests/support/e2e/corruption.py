"""Other contents in a block that a prefill server holds, behind its back: what a lost promise would look like.

Where the block lies is learnt as decode servers learn it, from the server's handshake; the bytes are written through
the operating system into the memory of the server's workers.
"""

from pathlib import Path

import numpy as np

from layout.geometry import Plane, WorkerGeometry
from tests.support.e2e.client import LOGPROB_TOLERANCE, TIE_TOLERANCE, Completion, KVTransferParams
from tests.support.e2e.cluster import Server
from tests.support.e2e.pair import Pair, control_keys
from tests.support.waiting import until
from transfer.control.client import ControlClient
from transfer.control.keys import ControlKeys
from transfer.control.messages import Checksummed, Checksums, Hello, NoChecksums, Welcome

#: The top byte of a float of some hundreds; of a byte, the largest number in fp8, and nearly so in int8.
_LARGE, _LARGE_BYTE = b"\x44", b"\x7e"


def overwrite_block(server: Server, params: KVTransferParams, group: int, entry: int) -> None:
    """Fill a block of a finished prefill with random float32 numbers, in all layers and on all ranks.

    ``group`` and ``entry``: the cache group, and the place in its table in ``params["remote_block_ids"]``.
    """
    block = params["remote_block_ids"][group][entry]
    assert block, "the server holds no such block"
    random = np.random.default_rng(block)
    for worker in _workers(params, control_keys(server)):
        caches = worker.groups[group]
        process = server.worker_process(worker.tp_rank, worker.pp_rank)
        with Path(f"/proc/{process}/mem").open("r+b", buffering=0) as memory:
            for plane in caches.planes:
                for start, size in _heads(plane, block, caches.rows(plane) // plane.block_tokens):
                    memory.seek(start)
                    memory.write(random.normal(size=size // 4).astype(np.float32).tobytes())


def spoil_numbers(
    server: Server,
    params: KVTransferParams,
    part: str,
    layers: str = "",
    *,
    stage: int | None = None,
    tp_rank: int | None = None,
) -> None:
    """Make the first number of every row of the last state, or of every token of the last block, a large one.

    Of a finished prefill, in the first layer of each pipeline stage that has the part and whose name ends with
    ``layers``, or in the last one of ``stage``; on all ranks, of which some may hold the same, or on ``tp_rank``. Of
    one token it would not do: attention may pass over it.
    """
    for worker in _workers(params, control_keys(server)):
        if stage not in (None, worker.pp_rank) or tp_rank not in (None, worker.tp_rank):
            continue
        planes = [(number, plane) for number, group in enumerate(worker.groups) for plane in group.planes]
        found = [
            (number, plane, layer)
            for number, plane in planes
            for layer, name in enumerate(plane.layers)
            if plane.part == part and name.endswith(layers)
        ]
        group, plane, layer = found[0 if stage is None else -1]
        kernel_blocks = worker.groups[group].rows(plane) // plane.block_tokens
        first = params["remote_block_ids"][group][-1] * kernel_blocks
        process = server.worker_process(worker.tp_rank, worker.pp_rank)
        with Path(f"/proc/{process}/mem").open("r+b", buffering=0) as memory:
            for block in range(first, first + kernel_blocks):
                for row in range(plane.block_tokens):
                    number = block * plane.block_stride + layer * plane.layer_stride + row * plane.token_stride
                    memory.seek(plane.address + number + plane.item_size - 1)
                    memory.write(_LARGE_BYTE if plane.item_size == 1 else _LARGE)


def assert_wrong_numbers_change_the_answer(
    pair: Pair,
    prompt: list[int],
    part: str,
    layers: str = "",
    right: Completion | None = None,
    *,
    stage: int | None = None,
    tp_rank: int | None = None,
) -> None:
    """Spoil a part of what P holds of a prompt; D's answer must be another one than ``right``, or than its own.

    ``stage`` and ``tp_rank``: see ``spoil_numbers``.

    Two tokens that are not the same may be as likely as each other by chance, but hardly as in a tie.
    """
    right = right or pair.decode.client.compute(prompt)
    params = pair.prefill.client.prefill(prompt)
    spoil_numbers(pair.prefill, params, part, layers, stage=stage, tp_rank=tp_rank)
    wrong = pair.decode_leg(prompt, params)
    assert wrong.status == 200, wrong.body
    enough = 5 * LOGPROB_TOLERANCE if wrong.tokens == right.tokens else TIE_TOLERANCE
    assert wrong.logprob_difference(right) > enough


def wait_until_summed(server: Server, params: KVTransferParams) -> None:
    """Wait until a server that verifies has the checksums of a finished prefill, by all its workers."""
    client = ControlClient(keys=control_keys(server))
    borders = (0, params["remote_num_tokens"])

    def summed(worker: int) -> bool:
        asked = Checksums(params["remote_engine_id"], params["lease_id"], worker, 0, borders)
        reply = client.request(params["remote_host"], params["remote_port"], asked, 10.0).result()
        assert isinstance(reply, Checksummed)
        assert reply.reason in {"", NoChecksums.PENDING}
        return not reply.reason

    try:
        for worker in range(server.spec.tensor_parallel):
            until(lambda worker=worker: summed(worker), "the blocks that are leased have checksums")  # type: ignore[misc]
    finally:
        client.close()


def _workers(params: KVTransferParams, keys: ControlKeys | None) -> tuple[WorkerGeometry, ...]:
    client = ControlClient(keys=keys)
    hello = Hello(params["remote_engine_id"])
    welcome = client.request(params["remote_host"], params["remote_port"], hello, 10.0).result()
    client.close()
    assert isinstance(welcome, Welcome)
    return welcome.workers


def _heads(plane: Plane, block: int, kernel_blocks: int) -> list[tuple[int, int]]:
    """(address, bytes) of every head of a block in every layer; a head of a block is one run on the CPU."""
    size = (plane.block_tokens - 1) * plane.token_stride + (plane.content - 1) * plane.content_stride + plane.item_size
    return [
        (plane.address + layer * plane.layer_stride + kernel * plane.block_stride + head * plane.head_stride, size)
        for layer in range(len(plane.layers))
        for kernel in range(block * kernel_blocks, (block + 1) * kernel_blocks)
        for head in range(plane.heads)
    ]
