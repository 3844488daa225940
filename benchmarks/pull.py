"""How fast a pull is, against one contiguous read of the same bytes: ``python -m benchmarks.pull``.

A prefill engine's worker (its memory, transfer engine and control endpoint, without a model) runs in a process of
its own; this process pulls 1,500 tokens of a SmolLM2-135M cache in BHLNC from it, through everything that a decode
worker uses. In one run, in turn: the pull as a whole, its read alone, one contiguous read through our engine, and
one contiguous blocking read through Mooncake's own call. Medians over the rounds.
"""

import argparse
import ctypes
import multiprocessing as mp
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from layout.copies import Copies
from layout.geometry import CacheGroup, ModelIdentity, Plane, Region, WorkerGeometry
from pd_connector.metadata import PullOrder
from pd_connector.params import RemotePrefill
from pd_connector.scheduler.producer import Producer
from pd_connector.worker.peer import PullContext, Settled
from pd_connector.worker.pulls import PullService
from transfer.control.client import ControlClient
from transfer.engine.mooncake import MooncakeEngine, MooncakeOptions

LAYERS, HEADS, HEAD_SIZE, ITEM, BLOCK_TOKENS = 30, 3, 64, 2, 32  # SmolLM2-135M in bfloat16
MODEL = ModelIdentity("LlamaForCausalLM", "", "", LAYERS, HEADS, HEAD_SIZE, "bfloat16", "bfloat16")
HOST = "127.0.0.1"


def geometry(memory: np.ndarray, blocks: int, address: str) -> WorkerGeometry:
    """One worker's cache in BHLNC over ``memory``."""
    page = BLOCK_TOKENS * 2 * HEAD_SIZE * ITEM
    plane = Plane(
        part="kv", layers=tuple(f"layers.{i}" for i in range(LAYERS)), head_start=0, heads=HEADS,
        block_tokens=BLOCK_TOKENS, content=2 * HEAD_SIZE, item_size=ITEM, blocks=blocks, address=memory.ctypes.data,
        layer_stride=page, block_stride=HEADS * LAYERS * page, head_stride=LAYERS * page,
        token_stride=2 * HEAD_SIZE * ITEM, content_stride=ITEM, packing="cpu",
    )  # fmt: skip
    regions = (Region(memory.ctypes.data, memory.nbytes),)
    return WorkerGeometry(0, 1, 0, 1, HEADS, address, (CacheGroup(BLOCK_TOKENS, 0, (plane,)),), regions)


class _Request:
    """What the producer looks at in a vLLM request."""

    prompt_embeds = None
    lora_request = None
    mm_features: tuple[()] = ()

    def __init__(self, request_id: str, tokens: int) -> None:
        self.request_id, self.num_prompt_tokens, self.prompt_token_ids = request_id, tokens, None


def serve(pipe: Connection, blocks: int, tokens: int) -> None:
    """The prefill engine: grants a lease for every table of block ids that comes through the pipe."""
    memory = np.random.default_rng(1).integers(0, 256, blocks * block_bytes(), np.uint8)
    engine = MooncakeEngine(MooncakeOptions(HOST))
    worker = geometry(memory, blocks, engine.address)
    engine.register(worker.regions)
    producer = Producer(HOST, 0, 30.0, MODEL, 1)
    producer.set_workers((worker,))
    pipe.send((engine.address, memory.ctypes.data, memory.nbytes))
    number = 0
    while (block_ids := pipe.recv()) is not None:
        producer.leases.collect()
        pipe.send(producer.finish_prefill(_Request(f"r{number}", tokens), (block_ids,)))  # type: ignore[arg-type]
        number += 1
    producer.close()
    engine.close()


def block_bytes() -> int:
    """Bytes of one block over all layers and heads."""
    return LAYERS * HEADS * BLOCK_TOKENS * 2 * HEAD_SIZE * ITEM


class Puller:
    """The decode worker."""

    def __init__(self, blocks: int) -> None:
        self.memory = np.zeros(blocks * block_bytes(), np.uint8)
        self.engine = MooncakeEngine(MooncakeOptions(HOST))
        self.client = ControlClient()
        local = geometry(self.memory, blocks, self.engine.address)
        self.engine.register(local.regions)

        def context(settle: Callable[[Settled], None]) -> PullContext:
            return PullContext(local, MODEL, self.engine, self.client, 0, 1, 10.0, 60.0, settle)

        self.pulls = PullService(context, 600.0)

    def pull(self, params: dict[str, object], block_ids: list[int], tokens: int) -> Settled:
        """One pull, waited for as the model runner does: by looking in again and again."""
        remote = RemotePrefill(**{k: v for k, v in params.items() if not k.startswith("do_")})  # type: ignore[arg-type]
        self.pulls.submit(PullOrder(remote.remote_request_id, remote, (tuple(block_ids),), 0, tokens))
        while not (settled := self.pulls.take_settled()):
            time.sleep(1e-4)
        assert not settled[0].cause, settled[0].reason
        return settled[0]

    def close(self) -> None:
        """End all threads."""
        self.pulls.close()
        self.client.close()
        self.engine.close()


def raw_read(te: object, address: str, destination: int, source: int, size: int) -> None:
    """One blocking read of one descriptor through Mooncake itself."""
    assert te.batch_transfer_sync_read(address, [destination], [source], [size]) == 0  # type: ignore[attr-defined]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    tokens = arguments.tokens
    needed = -(-tokens // BLOCK_TOKENS)
    blocks = 3 * needed
    pipe, other = mp.Pipe()
    process = mp.get_context("spawn").Process(target=serve, args=(other, blocks, tokens), daemon=True)
    process.start()
    address, remote_memory, remote_size = pipe.recv()
    puller = Puller(blocks)
    link = puller.engine.open(address, [Region(remote_memory, remote_size)])

    from mooncake.engine import TransferEngine  # noqa: PLC0415  after our engine has set its environment

    te = TransferEngine()
    te.initialize(HOST, "P2PHANDSHAKE", "tcp", "")
    size = needed * block_bytes()
    whole = Copies(
        np.array([puller.memory.ctypes.data]), np.array([remote_memory]), np.array([size])
    )
    times: dict[str, list[float]] = {}
    order = np.random.default_rng(2)
    for round_number in range(arguments.rounds + 3):
        for scattered in (False, True):
            ours, theirs = (
                sorted(order.choice(blocks - 1, needed, replace=False) + 1) if scattered else range(1, needed + 1)
                for _ in range(2)
            )
            pipe.send([int(i) for i in theirs])
            params = pipe.recv()
            ids = [int(i) for i in ours]
            start = time.perf_counter()
            settled = puller.pull(params, ids, tokens)
            total = time.perf_counter() - start
            if round_number >= 3:
                name = "scattered blocks" if scattered else "adjacent blocks"
                times.setdefault(f"pull, {name} ({settled.descriptors} descriptors)" if not scattered else f"pull, {name}", []).append(total)
                times.setdefault(f"  of which read, {name}", []).append(settled.seconds["read"])
                times.setdefault(f"  of which release, {name}", []).append(settled.seconds["release"])
        start = time.perf_counter()
        link.read(whole, 60.0)
        contiguous = time.perf_counter() - start
        start = time.perf_counter()
        raw_read(te, address, puller.memory.ctypes.data, remote_memory, size)
        raw = time.perf_counter() - start
        if round_number >= 3:
            times.setdefault("one contiguous read, our engine", []).append(contiguous)
            times.setdefault("one contiguous read, Mooncake's blocking call", []).append(raw)
    base = statistics.median(times["one contiguous read, our engine"])
    print(f"{tokens} tokens of SmolLM2-135M, {size / 1e6:.1f} MB, median of {arguments.rounds}")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:48s} {1e3 * median:8.2f} ms {size / median / 1e9:6.2f} GB/s {base / median:6.0%} of contiguous rate")
    link.close()
    puller.close()
    pipe.send(None)
    process.join(10)


if __name__ == "__main__":
    main()
