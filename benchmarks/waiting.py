"""What requests cost that wait for blocks: ``python -m benchmarks.waiting``.

Leases: a decode engine keeps the leases of many waiting requests alive, against a control server in another process.
Reported are the processor time of this process (the renewal thread and the control client; nothing else runs) as a
share of a core, and the longest time that a call of the scheduler's thread took meanwhile, by wall clock: on a busy
machine it includes what the machine did to this process. On the other side, a prefill engine whose leases expire one by
one, because nobody renews them: the time in which it collects what they held.

Host memory: vLLM asks in every step about the first waiting request, until it has blocks for it. Reported is the time
to answer, when host memory holds the whole prompt.
"""

import argparse
import gc
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
from msgspec import structs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from layout.geometry import ModelIdentity
from pd_connector.orders import Report, StoreEnds
from pd_connector.params import RemotePrefill
from pd_connector.scheduler.host_tier import HostTier
from pd_connector.scheduler.lease_service import LeaseService
from pd_connector.scheduler.leases import LeaseTable
from pd_connector.scheduler.renewals import Renewals
from pd_connector.vllm.block_pools import HostBlockPool
from transfer.control.client import ControlClient
from transfer.control.server import ControlServer

BLOCK_TOKENS = 16
LEASES = (100, 1_000, 10_000)
PROMPTS = (1_200, 12_000, 120_000)
TTL_S, SECONDS, ASKS = 30.0, 22.0, 200
SHARE, CALL_MS, ASK_MS = 0.03, 1.0, 0.1  # the targets


def serve(leases: int, answer: Connection) -> None:
    """Be a prefill engine with so many leases, until the other end says stop."""
    table: LeaseTable[None] = LeaseTable(TTL_S, time.monotonic)
    model = ModelIdentity("none", "none", "", 1, 1, 64, "none", "none")
    service = LeaseService(table, model, 1)
    server = ControlServer(service, "127.0.0.1", 0)
    server.start()
    for number in range(leases):
        table.grant(f"{number:032x}", None, "contents")
    answer.send((server.port, service.engine_id))
    answer.recv()
    server.close()
    answer.send(table.active)


def renew(leases: int) -> tuple[float, list[float], int]:
    """Return the share of a core, the seconds of each call of the scheduler's thread, and the leases still alive."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(leases, theirs))
    process.start()
    port, engine_id = ours.recv()
    remote = RemotePrefill(engine_id, "127.0.0.1", port, ((1,),), 1, "lease", TTL_S, "")
    client = ControlClient()
    renewals = Renewals(client, 10.0, 600.0)
    renewals.start()
    for number in range(leases):
        renewals.keep(str(number), structs.replace(remote, lease_id=f"{number:032x}"))
    calls = []
    gc.collect()
    gc.freeze()  # as vLLM's engine does once it has started: collections do not look at what imports have left
    busy, start = time.process_time(), time.monotonic()
    while time.monotonic() < start + SECONDS:
        time.sleep(0.02)  # a step
        before = time.perf_counter()
        renewals.keep("new", structs.replace(remote, lease_id="new"))
        renewals.lost("0")
        renewals.drop("new")
        calls.append(time.perf_counter() - before)
    share = (time.process_time() - busy) / (time.monotonic() - start)
    gc.unfreeze()
    renewals.close()
    ours.send("stop")
    alive = ours.recv()
    process.join()
    return share, calls, alive


def collect(leases: int) -> list[float]:
    """Return the seconds of each look for expired leases, of which some are found."""
    now = 0.0
    table: LeaseTable[None] = LeaseTable(TTL_S, lambda: now)
    for number in range(leases):
        now = number * TTL_S / leases
        table.grant(f"{number:032x}", None, "contents")
    seconds = []
    for step in range(ASKS):
        now = TTL_S + step * 0.02
        before = time.perf_counter()
        table.collect()
        seconds.append(time.perf_counter() - before)
    return seconds


def ask(tokens: int) -> list[float]:
    """Return the seconds of each answer about a prompt that host memory holds."""
    init_none_hash(sha256_cbor)
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=128, dtype=torch.bfloat16)
    blocks = tokens // BLOCK_TOKENS + 16
    manager = KVCacheManager(
        KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layers.0"], spec)]), max_model_len=tokens + 64,
        scheduler_block_size=BLOCK_TOKENS, hash_block_size=BLOCK_TOKENS, max_in_flight_tokens=tokens + 64,
    )  # fmt: skip
    config: Any = SimpleNamespace(max_in_flight_tokens=tokens + 64, num_prefill_lookahead_tokens=0)
    tier = HostTier(HostBlockPool(config, manager, blocks), 1)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)

    def a_request(name: str) -> Request:
        return Request(name, list(range(tokens)), SamplingParams(max_tokens=1), None, block_hasher=hasher)

    first = a_request("first")
    tier.add(first)
    tier.allocated(first, manager.allocate_slots(first, tokens), 0)
    for _ in range(2):
        for order in tier.step_orders({"first": tokens}).stores:
            tier.settled(set(), set(), Report(stores={order.store_id: StoreEnds(1)}))
        first.num_computed_tokens = tokens
    tier.finish(first, ())
    manager.free(first)
    manager.reset_prefix_cache()
    second, seconds = a_request("second"), []
    tier.add(second)
    for _ in range(ASKS):
        before = time.perf_counter()
        found = tier.missing_tokens(second, 0)
        seconds.append(time.perf_counter() - before)
        assert found > tokens - 2 * BLOCK_TOKENS, f"only {found} tokens were found"
    return seconds


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Print the tables, and return their figures."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(words)
    print(f"leases kept alive for {SECONDS:.0f} s; targets at 10,000: {SHARE:.0%} of a core, {CALL_MS:.0f} ms a call")
    print(f"{'leases':>8} {'of a core':>10} {'call, median us':>16} {'longest ms':>11} {'alive':>8}")
    renewed, collected, asked = {}, {}, {}
    for leases in LEASES:
        share, calls, alive = renew(leases)
        median, longest = statistics.median(calls) * 1e6, max(calls) * 1e3
        print(f"{leases:>8,} {share:>10.2%} {median:>16.0f} {longest:>11.2f} {alive:>8,}")
        renewed[str(leases)] = {"share": share, "call_us": median, "longest_ms": longest, "alive": alive}
    print(f"\nleases that expire one by one; target: {CALL_MS:.0f} ms a call")
    print(f"{'leases':>8} {'call, median us':>16} {'longest ms':>11}")
    for leases in LEASES:
        seconds = collect(leases)
        median, longest = statistics.median(seconds) * 1e6, max(seconds) * 1e3
        print(f"{leases:>8,} {median:>16.0f} {longest:>11.2f}")
        collected[str(leases)] = {"call_us": median, "longest_ms": longest}
    print(f"\nasks about a prompt in host memory; target: a median of {ASK_MS} ms, whatever the length")
    print(f"{'tokens':>8} {'first ms':>9} {'median ms':>10} {'longest of the others':>22}")
    for tokens in PROMPTS:
        seconds = ask(tokens)
        first, others = seconds[0] * 1e3, [each * 1e3 for each in seconds[1:]]
        print(f"{tokens:>8,} {first:>9.3f} {statistics.median(others):>10.4f} {max(others):>22.3f}")
        asked[str(tokens)] = {"first_ms": first, "median_ms": statistics.median(others), "longest_ms": max(others)}
    return {"renewed": renewed, "collected": collected, "asked": asked}


if __name__ == "__main__":
    main()
