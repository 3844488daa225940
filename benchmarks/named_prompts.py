"""What prompts that are followed by name cost a prefill engine's steps: ``python -m benchmarks.named_prompts``.

Timed is what the connector does for them on the scheduler's thread in every step: to note what the step computes, and,
when it has ended, to announce what it has computed. The prompts are computed in chunks, together with others that have
no names. Blocks are vLLM's own manager's, the control server is the real one; nobody asks it, because its answers are
made on its own thread. The wall clock, one step a sample; the worst includes what the machine did to this process, but
not Python's garbage collector, which is off meanwhile: whatever allocates may set it off, and it then looks at all
tokens of all requests.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from layout.geometry import CacheGroup, ModelIdentity, WorkerGeometry
from pd_connector.scheduler.announcer import Announcer
from pd_connector.scheduler.lease_service import LeaseService
from pd_connector.scheduler.leases import LeaseTable
from pd_connector.vllm.block_pools import Leased
from pd_connector.vllm.device_blocks import DeviceBlocks
from transfer.control.server import ControlServer

BLOCK_TOKENS, CHUNK_TOKENS, STEPS = 16, 512, 16
PROMPT_TOKENS = STEPS * CHUNK_TOKENS
NAMED, UNNAMED = (0, 1, 16), 16
CALL_MS, EACH_US = 1.0, 50.0  # the targets


class Engine:
    """A prefill engine's blocks and requests, without a model: ``step`` computes a chunk of each."""

    def __init__(self, requests: int) -> None:
        blocks = requests * PROMPT_TOKENS // BLOCK_TOKENS + 16
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=128, dtype=torch.bfloat16)
        self._manager = KVCacheManager(
            KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layers.0"], spec)]), max_model_len=PROMPT_TOKENS + 64,
            scheduler_block_size=BLOCK_TOKENS, hash_block_size=BLOCK_TOKENS,
            max_in_flight_tokens=requests * CHUNK_TOKENS,
        )  # fmt: skip
        device = DeviceBlocks()
        device.bind(self._manager)
        leases: LeaseTable[Leased] = LeaseTable(30.0, time.monotonic)
        service = LeaseService(leases, ModelIdentity("none", "none", "", 1, 1, 128, "none", "none"), 1)
        service.set_workers((WorkerGeometry(0, 1, 0, 1, "", (CacheGroup(BLOCK_TOKENS, 0, ()),), ()),))
        self._server = ControlServer(service, "127.0.0.1", 0)
        self._server.start()
        service.notify = self._server.changed
        self._announcer = Announcer(service, device)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
        self._requests: list[Request] = []

    def ask(self, number: int, *, named: bool) -> None:
        """Take up a request whose prompt no other has."""
        params = {"do_remote_decode": True} | ({"transfer_id": f"t{number}"} if named else {})
        sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
        tokens = [number, *range(1, PROMPT_TOKENS)]
        request = Request(f"r{number}", tokens, sampling, None, block_hasher=self._hasher)
        self._announcer.add(request)
        self._requests.append(request)

    def step(self) -> tuple[float, float]:
        """Return the seconds that the connector took to note a step, and to announce what it has computed."""
        for request in self._requests:
            assert self._manager.allocate_slots(request, CHUNK_TOKENS) is not None, "blocks are short"
        scheduled = {request.request_id: CHUNK_TOKENS for request in self._requests}
        start = time.perf_counter()
        reported = self._announcer.schedule(scheduled)
        noted = time.perf_counter() - start
        for request in self._requests:
            request.num_computed_tokens += CHUNK_TOKENS
        start = time.perf_counter()
        self._announcer.computed(dict.fromkeys(reported, 1), 1)
        return noted, time.perf_counter() - start

    def end(self) -> None:
        """Let the requests go, after which others may come."""
        for request in self._requests:
            request.status = SimpleNamespace(name="FINISHED_ABORTED")
            self._announcer.finish(request, is_granted=False)
            self._manager.free(request)
        self._requests.clear()

    def close(self) -> None:
        """Stop the control server."""
        self._server.close()


def steps(named: int, rounds: int) -> list[tuple[float, float]]:
    """Return the seconds of every step with so many named prompts beside ``UNNAMED`` others."""
    engine, taken = Engine(named + UNNAMED), list[tuple[float, float]]()
    gc.collect()
    gc.freeze()  # as vLLM's engine does once it has started
    for turn in range(rounds + 1):
        for number in range(named + UNNAMED):
            engine.ask(turn * 1000 + number, named=number < named)
        gc.collect()
        gc.disable()
        times = [engine.step() for _ in range(STEPS)]
        gc.enable()
        taken += times if turn else []
        engine.end()
    gc.unfreeze()
    engine.close()
    return taken


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Print the table, and return its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help=f"of {STEPS} steps each (25)")
    arguments = parser.parse_args(words)
    init_none_hash(sha256_cbor)
    print(
        f"beside {UNNAMED} prompts without names; targets: {EACH_US:.0f} us a step and prompt, {CALL_MS:.0f} ms a call"
    )
    columns = ("note, us", "announce, us", "a prompt, us", "p99 call, ms", "longest, ms")
    print(f"{'named':>6} " + " ".join(f"{column:>13}" for column in columns))
    figures: dict[str, dict[str, float]] = {}
    without = 0.0
    for named in NAMED:
        taken = steps(named, arguments.rounds)
        note, announce = (statistics.median(each) * 1e6 for each in zip(*taken, strict=True))
        together = statistics.median(sum(each) for each in taken) * 1e6
        without = together if not named else without
        each_us = (together - without) / named if named else 0.0
        calls_ms = [max(each) * 1e3 for each in taken]
        longest, p99 = max(calls_ms), statistics.quantiles(calls_ms, n=100)[-1]
        print(f"{named:>6} {note:>13.1f} {announce:>13.1f} {each_us:>13.1f} {p99:>13.3f} {longest:>13.3f}")
        figures[str(named)] = {
            "note_us": note, "announce_us": announce, "each_us": each_us, "p99_ms": p99, "longest_ms": longest,
        }  # fmt: skip
    return {"named": figures}


if __name__ == "__main__":
    main()
