"""Servers that pull prefixes from each other, while they die and stop."""

from dataclasses import replace

from tests.support.e2e.deployments import (
    CHAOS_LEASE_TTL_S,
    CHAOS_PULL_TIMEOUT_S,
    DEVICE_BLOCKS,
    KV_BLOCK_BYTES,
    SHORT,
    Deployment,
    decode,
    leases,
    prefill,
    with_host_memory,
)

_TIMES = (*leases(CHAOS_LEASE_TTL_S), ("pull_timeout_s", CHAOS_PULL_TIMEOUT_S))

#: P, which forgets soon, finds in D's device and host memory what both have computed. Neither device has room for what
#: is asked of it at once.
CHAOS_PREFIXES = Deployment(
    "chaos prefixes",
    (
        (
            "P",
            replace(
                prefill(),
                kv_cache_bytes=DEVICE_BLOCKS * KV_BLOCK_BYTES,
                arguments=SHORT,
                options=(*_TIMES, ("peers", ("readers",))),
            ),
        ),
        (
            "D",
            with_host_memory(
                replace(decode("recompute"), options=(*_TIMES, ("queue_timeout_s", CHAOS_PULL_TIMEOUT_S))),
                ("host_transfers", "auto"),
                ("serve_prefixes", True),
            ),
        ),
    ),
    slow=True,
)
