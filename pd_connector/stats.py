"""The names of the connector's metrics, and the recorder that each process keeps.

Workers and the scheduler side record in their own process. vLLM carries the records of a step to the API server, where
``vllm.metrics`` exports them.
"""

import time
from collections import Counter as Tally
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from pd_connector.orders import Cause, LeaseEnd
from transfer.control.server import ServerCounters

PHASES = ("queue", "handshake", "wait", "plan", "read", "reshape", "verify", "release", "total")
HOST_COPIES = ("store", "load")


class ComputedHere(StrEnum):
    """Why a decode engine computed a prompt, besides the causes for which the scheduler side refuses a pull."""

    PULL = "pull"  # its pull failed; ``pull_failures`` says why
    WINDOW = "window"  # the prefill engine lacks the first block of a window or chunk, or a recurrent layer's state
    SHARED = "shared"  # another request has its lease or transfer, and too little of the prompt is in this prefix cache
    UNPROVEN = "unproven"  # its prefill engine is not proven yet, and this prompt does not try: see docs/metrics.md
    PROMPT = "prompt"  # its answer comes of computing the prompt, as with prompt_logprobs
    DECLINED = "declined"  # vLLM did not take what could be pulled
    ROLE = "role"  # the engine is none that decodes for others (kv_role)
    UNUSABLE = "unusable"  # kv_transfer_params are of a contract that the connector does not speak


#: Causes that workers find, when they read. For the others, the scheduler side refuses a pull.
OF_READS = frozenset({Cause.READ, Cause.TIMEOUT, Cause.CHECKSUM, Cause.UNCONFIRMED})
REFUSALS = tuple(cause for cause in Cause if cause is not Cause.NONE and cause not in OF_READS)

COUNTERS = {
    "pulls": "Pulls that succeeded, counted on every rank.",
    "pull_bytes": "Bytes of KV cache pulled.",
    "pull_bytes_from_host": "Bytes pulled from the prefill engine's host memory (host_transfers).",
    "pull_bytes_over_ipc": "Bytes pulled on the same host, over CUDA IPC.",
    "landed_bytes": "Bytes pulled to this engine's host memory (host_transfers).",
    "pull_descriptors": "Descriptors read by pulls.",
    "pull_tokens": "Prompt tokens pulled, counted on every rank.",
    "pulls_ahead": "Pulls that began before the prompt was computed.",
    "pull_bytes_ahead": "Bytes pulled before the prompt was computed.",
    "pull_restarts": "Pulls begun again, as the prefill engine preempted the prompt or moved its lease, on every rank.",
    "prefix_tokens": "Prompt tokens pulled from peers instead of being computed.",
    "prefix_bytes": "Bytes of these tokens, on all ranks.",
    "pool_tokens": "Prompt tokens fetched from the pool instead of being computed.",
    "host_tokens": "Prompt tokens loaded from host memory.",
    "host_blocks": "Blocks stored in host memory.",
}
LABELLED = {
    "pull_failures": ("cause", "Pulls that failed."),
    "prompts_computed": ("cause", "Prompts of decode legs that this engine computed instead of pulling."),
    "leases": ("event", "Leases: granted, and how they ended."),
    "transfers": (
        "event",
        "Prompts with a transfer_id: begun, in_host (found in host memory), restarted (preempted), complete, ended "
        "(without a lease), refused (a malformed id, or another request's).",
    ),
    "host_bytes": ("event", "Bytes copied between the device and host memory, on all ranks: stored, loaded."),
    "host_failures": ("event", "Copies to or from host memory that failed on a rank: store, load."),
    "lease_moves": (
        "event",
        "Leases that moved to host memory (short: requests waited for blocks; share: leases held too many) or did not "
        "(full: no room there; read: a reader came first; ended: the lease did; failed: the copy did).",
    ),
    "lease_blocks_moved": ("event", "Blocks of leases that moved to host memory: copied, or present there already."),
    "landings": (
        "event",
        "Prompts pulled to host memory: landed, failed, or left (the request had gone, or the cache was reset).",
    ),
    "canaries": ("outcome", "Canaries: proven, differs, failed (not pulled), left (aborted or preempted)."),
    "landing_fallbacks": ("reason", "Prompts for which host memory had no room: full, too_large."),
    "prefixes": (
        "event",
        "Prompts whose prefix other engines were asked for: asked, pulled, nothing (nobody held enough), late "
        "(computing would have been faster), full (too few free blocks), unproven, failed.",
    ),
    "prefixes_served": ("event", "Questions of other engines for prefixes: found (and leased), nothing, refused."),
    "pool_prompts": (
        "event",
        "Prompts that wait for the pool: asked, fetched, nothing, late (computing would have been faster), full (too "
        "few free host blocks), failed.",
    ),
    "pool_blocks": (
        "event",
        "Blocks of the pool: put (or there already), refused (not all of it was kept, twice), left (too many waited), "
        "fetched, gone (missing when wanted).",
    ),
    "pool_bytes": ("event", "Bytes of objects, on all ranks: put (or there already), fetched."),
    "pool_failures": ("event", "Orders to a rank that failed or were late: put, fetched."),
    "control_refusals": ("cause", "Connections and messages that the control channel refused."),
}
#: Label values. A counter that appeared with its first event would hide that event from rate() and alerts.
LABELS: dict[str, tuple[str, ...]] = {
    "pull_failures": tuple(cause.value for cause in Cause if cause is not Cause.NONE),
    "prompts_computed": (*(cause.value for cause in REFUSALS), *(why.value for why in ComputedHere)),
    "leases": ("granted", *(end.value for end in LeaseEnd)),
    "transfers": ("begun", "in_host", "restarted", "complete", "ended", "refused"),
    "host_bytes": ("stored", "loaded"),
    "host_failures": HOST_COPIES,
    "lease_moves": ("short", "share", "full", "read", "ended", "failed"),
    "lease_blocks_moved": ("copied", "present"),
    "landings": ("landed", "failed", "left"),
    "canaries": ("proven", "differs", "failed", "left"),
    "landing_fallbacks": ("full", "too_large"),
    "prefixes": ("asked", "pulled", "nothing", "late", "full", "unproven", "failed"),
    "prefixes_served": ("found", "nothing", "refused"),
    "pool_prompts": ("asked", "fetched", "nothing", "late", "full", "failed"),
    "pool_blocks": ("put", "refused", "left", "fetched", "gone"),
    "pool_bytes": ("put", "fetched"),
    "pool_failures": ("put", "fetched"),
    "control_refusals": tuple(ServerCounters().refusals),
}

GAUGES = {
    "transfers_waiting": "Decode legs that wait for a prefill engine to compute their prompt (transfer_id).",
    "peers_refused": "Prefill engines that a canary refused, once for each adapter, also if they have ended since.",
    "prompts_ahead": "Prompts under way whose pull was ordered before they were computed.",
    "landings_under_way": "Prompts that are being pulled to host memory.",
    "leases_active": "Active leases.",
    "lease_oldest_age_seconds": "Age of the oldest active lease, in whole seconds.",
    "leases_in_host": "Active leases in host memory.",
    "leased_blocks": "KV blocks that leases hold, each counted once.",
    "pool_works": "1 if the pool works, 0 after a failure until something has succeeded.",
    "host_blocks_cached": "Blocks in host memory that prefix lookups can find.",
    "host_blocks_lent": "Host blocks that cannot be evicted: of leases, and of prompts that land, wait or load.",
    "host_blocks_capacity": "Capacity of host memory, in blocks.",
}
#: Gauges of which each rank has its own number. The largest is exported: a block is in use if it is on any rank.
GAUGES_OF_RANKS = {
    "quarantined_blocks": "KV blocks of failed pulls to which reads may still write, on the rank with most.",
}


class StatsRecorder:
    """Collects the statistics of one process between two reports.

    Belongs to the thread on which vLLM calls the connector. Other threads pass their numbers on with their results.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._counts: Tally[str] = Tally()
        self._seconds: dict[str, list[float]] = {}
        self._gauges: dict[str, float] = {}
        self._new_gauges: dict[str, float] = {}
        self._shares: dict[str, dict[object, float]] = {}
        self._longest_calls: dict[str, float] = {}
        self._new_longest: dict[str, float] = {}

    def count(self, name: str, number: int = 1, label: str = "") -> None:
        """Add ``number`` to a counter; ``label`` is the value of its label, if it has one."""
        if number:
            self._counts[f"{name}:{label}" if label else name] += number

    def observe(self, phase: str, seconds: float) -> None:
        """Add a duration to the histogram of pulls, by phase, or of host copies, by kind."""
        self._seconds.setdefault(phase, []).append(seconds)

    def gauge(self, name: str, number: float) -> None:
        """Set a gauge."""
        if self._gauges.get(name) != number:
            self._gauges[name] = self._new_gauges[name] = number

    def gauge_of_rank(self, name: str, number: float, owner: object = None) -> None:
        """Set an owner's share of a gauge of this rank, which is the sum of them.

        It is reported again as long as it is not 0, so that the ranks can be compared.
        """
        shares = self._shares.setdefault(name, {})
        if number:
            shares[owner] = number
        else:
            shares.pop(owner, None)
        if (total := sum(shares.values())) or self._gauges.get(name):
            self._gauges[name] = self._new_gauges[name] = total

    @contextmanager
    def timed(self, call: str) -> Iterator[None]:
        """Measure the wall time of a connector call; the longest is reported."""
        start = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - start
            if seconds > self._longest_calls.get(call, 0.0):
                self._longest_calls[call] = self._new_longest[call] = seconds

    def take(self) -> dict[str, Any] | None:
        """Return what was recorded since the last call, in the form of ``nothing``; None if nothing was."""
        if not (self._counts or self._seconds or self._new_gauges or self._new_longest):
            return None
        counts, seconds, gauges, calls = dict(self._counts), self._seconds, self._new_gauges, self._new_longest
        self._counts, self._seconds, self._new_gauges, self._new_longest = Tally(), {}, {}, {}
        return {"counts": counts, "seconds": seconds, "gauges": gauges, "calls": calls}


def nothing() -> dict[str, Any]:
    """Return empty statistics, in the form in which statistics travel between processes.

    - ``counts``: numbers by name, labelled ones by "name:label".
    - ``seconds``: lists of durations by phase of a pull or kind of host copy.
    - ``gauges``: latest numbers by name; of ``GAUGES_OF_RANKS``, the largest of all ranks.
    - ``calls``: longest duration of each connector call since the process started, in seconds.
    """
    return {"counts": {}, "seconds": {}, "gauges": {}, "calls": {}}
