"""Settings of earlier versions: what took the place of each, or that nothing did and why."""

from pd_connector.engine_limits import BOTH_ROLES_FRACTION
from pd_connector.engine_limits import ENGINE_LIMITS as LIMITS

_AHEAD = (
    f"nothing took its place: {LIMITS.max_pulls_ahead} prompts at most are pulled while they are computed, and hold at "
    f"most {LIMITS.max_ahead_fraction:g} of the blocks; the others are pulled when they are complete"
)
_TUNED = (
    "staging_bytes", "descriptors_per_call", "max_descriptors_in_flight", "longest_poll_us", "descriptor_cost_us",
    "byte_cost_ns",
)  # fmt: skip

#: By key, how the sentence about it goes on.
OLD_SETTINGS = {
    "max_lease_age_s": f"nothing took its place: a lease ends {LIMITS.max_lease_age_s:g} s after it was granted, "
    "however often it is renewed",
    "max_leased_fraction": f"nothing took its place: leases may hold {BOTH_ROLES_FRACTION:g} of the blocks of an "
    "engine with kv_role kv_both, so that requests that pull find some, and all blocks of others",
    "transfer_timeout_s": "queue_timeout_s took its place: the other leg of a request is waited for as long",
    "max_pulls_ahead": _AHEAD,
    "max_ahead_fraction": _AHEAD,
    "handshake_timeout_s": f"nothing took its place: a prefill engine has {LIMITS.handshake_timeout_s:g} s to answer "
    "a message",
    "peer_idle_s": f"nothing took its place: a connection may close after {LIMITS.peer_idle_s:g} s without a pull",
    "host_scrub": "nothing took its place: slots of host memory are not zeroed, so isolate the data port "
    "(docs/security.md)",
    "host_huge_pages": "nothing took its place: the kernel chooses the pages of host memory",
    "move_leases_above": "nothing took its place: with host_transfers, leases that nobody reads yet move to host "
    f"memory when they hold more than {LIMITS.move_leases_above:g} of the blocks",
    "pull_to": "host_transfers took its place: 'off' for 'device', 'always' for 'host', and 'auto' as before",
} | {key: f"tuning took its place: {{'tuning': {{'{key}': ...}}}}" for key in _TUNED}
