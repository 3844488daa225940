"""Lists of docs/settings.md and docs/metrics.md, made from the code that they describe."""

import json
import re
from collections.abc import Iterator

from pd_connector.config import ConnectorConfig, Tuning
from pd_connector.stats import COUNTERS, GAUGES, GAUGES_OF_RANKS, LABELLED, LABELS

#: Which metrics prefill engines export, and which every engine with host memory. All others are decode engines'.
OF_PREFILL = (
    "leases", "transfers", "lease_moves", "lease_blocks_moved", "control_refusals",
    "leases_active", "lease_oldest_age_seconds", "leases_in_host", "leased_blocks",
)  # fmt: skip
OF_HOST_MEMORY = (
    "host_tokens", "host_blocks", "host_bytes", "host_failures",
    "host_blocks_cached", "host_blocks_lent", "host_blocks_capacity",
)  # fmt: skip
#: Labels whose values have a list of their own in the page, which a test compares.
EXPLAINED = ("pull_failures", "prompts_computed")


def settings() -> str:
    """Return the keys of ``kv_connector_extra_config``: each with its default, and what it does."""
    return "\n".join(
        f"- `{name}` (`{_default(field.default)}`): {_in_short(field.description or '')}"
        for name, field in ConnectorConfig.model_fields.items()
    )


def _default(value: object) -> str:
    """Return a default as JSON has it; of an object, only what differs from its own defaults."""
    return json.dumps({} if isinstance(value, Tuning) else value)


def metrics_of_decode() -> str:
    """Return what a decode engine counts of its pulls."""
    return _list(name for name in _texts() if name not in OF_PREFILL + OF_HOST_MEMORY)


def metrics_of_prefill() -> str:
    """Return what a prefill engine counts of its leases."""
    return _list(OF_PREFILL)


def metrics_of_host_memory() -> str:
    """Return what an engine with host memory counts of it."""
    return _list(OF_HOST_MEMORY)


def _list(names: Iterator[str] | tuple[str, ...]) -> str:
    texts = _texts()
    return "\n".join(_in_short(texts[name]) for name in names)


def _texts() -> dict[str, str]:
    """Return a line for each of all counters and gauges, by their names in the code."""
    lines = {name: f"- `vllm:pd_{name}_total`: {text}" for name, text in COUNTERS.items()}
    for name, (label, text) in LABELLED.items():
        told = name in EXPLAINED or all(value in text for value in LABELS[name])
        values = "" if told else " " + ", ".join(f"`{value}`" for value in LABELS[name]) + "."
        lines[name] = f"- `vllm:pd_{name}_total{{{label}}}`: {text}{values}"
    return lines | {name: f"- `vllm:pd_{name}`: {text}" for name, text in (GAUGES | GAUGES_OF_RANKS).items()}


def _in_short(text: str) -> str:
    """Return a text with the pages' names for the engines, P and D."""
    return re.sub(r"\b(?:[Aa]|[Tt]he) (p|d)(?:refill|ecode) engine\b", lambda match: match[1].upper(), text)
