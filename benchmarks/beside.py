"""How long a short pull takes alone, and beside a long one from the same prefill engine.

Whole pulls as in ``benchmarks.pull``: handshake done, plan, read over Mooncake TCP on loopback, confirmation.

    python -m benchmarks.beside
"""

import argparse
import multiprocessing as mp
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.pull import BLOCK_TOKENS, Puller, block_bytes, serve
from pd_connector.orders import Orders, PullOrder
from pd_connector.params import RemotePrefill
from pd_connector.worker.pull_end import PullEnd


class Bench:
    """One prefill process and one puller, with room for a long and a short prompt."""

    def __init__(self, long_tokens: int, short_tokens: int) -> None:
        long_blocks, short_blocks = (-(-tokens // BLOCK_TOKENS) for tokens in (long_tokens, short_tokens))
        self.long = list(range(1, 1 + long_blocks))
        self.short = list(range(1 + long_blocks, 1 + long_blocks + short_blocks))
        blocks = 1 + long_blocks + short_blocks
        self._pipe, other = mp.Pipe()
        arguments = other, blocks, long_tokens, True
        self._process = mp.get_context("spawn").Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        self._pipe.recv()
        self._puller = Puller(blocks, packed=True)
        self._pulls = self._puller.pulls[False]
        self._ended: dict[str, PullEnd] = {}

    def begin(self, block_ids: list[int]) -> str:
        """Begin a pull of the blocks into those of the same ids; its request id."""
        self._pipe.send((block_ids, False))
        remote = msgspec.convert(self._pipe.recv(), RemotePrefill)
        end_token = len(block_ids) * BLOCK_TOKENS - 1
        order = PullOrder(remote.remote_request_id, remote, (tuple(block_ids),), 0, end_token, remote.lease_id)
        self._pulls.execute(Orders(pulls=(order,)))
        return order.request_id

    def has_ended(self, request_id: str) -> bool:
        """Look in, as the model runner does."""
        for end in self._pulls.take_ends():
            assert not end.cause, end.reason
            self._ended[end.request_id] = end
        return request_id in self._ended

    def seconds(self, request_id: str) -> float:
        """Wait for a pull; how long it took."""
        started = time.monotonic()
        while not self.has_ended(request_id):
            # Often for a short one, whose next round waits for it; a long one would be slowed down by that.
            time.sleep(1e-4 if time.monotonic() - started < 0.05 else 5e-3)
        return self._ended[request_id].seconds["total"]

    def close(self) -> None:
        """End everything."""
        self._puller.close()
        self._pipe.send(None)
        self._process.join(10)


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", type=int, default=100_000, help="tokens")
    parser.add_argument("--short", type=int, default=100, help="tokens")
    parser.add_argument("--rounds", type=int, default=3, help="long pulls")
    arguments = parser.parse_args(words)
    bench = Bench(arguments.long, arguments.short)
    for blocks in (bench.long, bench.short):
        bench.seconds(bench.begin(blocks))  # warm
    alone, beside, long_alone, long_beside = list[float](), list[float](), list[float](), list[float]()
    for _ in range(arguments.rounds):
        alone += [bench.seconds(bench.begin(bench.short)) for _ in range(20)]
        long_alone.append(bench.seconds(bench.begin(bench.long)))
        long = bench.begin(bench.long)
        while not bench.has_ended(long):
            time.sleep(random.uniform(0.03, 0.07))  # so that it does not come at the same moment every time
            beside.append(bench.seconds(bench.begin(bench.short)))
        long_beside.append(bench.seconds(long))
    size = len(bench.long) * block_bytes() / 1e9
    print(f"\n{arguments.short} tokens beside {arguments.long} ({size:.2f} GB), {len(beside)} pulls")
    for name, seconds in (("alone", alone), ("beside", beside), ("the long one alone", long_alone)):
        print(f"  {name:32s} median {1e3 * statistics.median(seconds):9.2f} ms, longest {1e3 * max(seconds):9.2f} ms")
    print(f"  {'the long one, with short ones':32s} median {1e3 * statistics.median(long_beside):9.2f} ms")
    ratio = statistics.median(beside) / statistics.median(alone)
    print(f"  beside / alone: {ratio:.2f}")
    bench.close()
    medians = {"alone": alone, "beside": beside, "long_alone": long_alone, "long_beside": long_beside}
    return {"ratio": ratio, **{f"{name}_ms": 1e3 * statistics.median(each) for name, each in medians.items()}}


if __name__ == "__main__":
    main()
