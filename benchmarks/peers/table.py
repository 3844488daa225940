"""The results as Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.peers.summary import in_order

Row = Mapping[str, Any]
NOTES = """\
Milliseconds are p50 / p90 / p99. Handover: from P's answer to D's first token, less what a request of one token takes
at D. Of a few requests, p99 is the longest. MB/s: of one transfer, as each connector counts it. Descriptors and MB are
of one request, all ranks together. Repeats: how often each way was asked, as many times as the run's time allowed.

Eight at once have 500 tokens each: the caches hold no eight longer prompts, and larger ones would take more time and
memory than a run has. Both layouts are compared at TP 1 to 1 only, for the same reason.

vLLM's MooncakeConnector does not start on CPU as it is: it asks for `torch.accelerator.current_device_index`, which
raises where there is no accelerator. The benchmark's plugin answers 0 in its place, and writes what the connector
counts to a file."""


def markdown(result: Mapping[str, Any]) -> str:
    """Return all tables of a results' file, under a line that says where and when it was measured."""
    figures = result["figures"]
    labels = {**figures["labels"], "alone": "one server, no transfer"}
    parts = ["# Beside vLLM's own connectors", _where(result)]
    cases = in_order(figures.get("cases", {}))
    for layout, prefill_tp, decode_tp in dict.fromkeys((r["layout"], r["prefill_tp"], r["decode_tp"]) for r in cases):
        mine = [r for r in cases if (r["layout"], r["prefill_tp"], r["decode_tp"]) == (layout, prefill_tp, decode_tp)]
        parts += [f"## {layout}, TP {prefill_tp} to {decode_tp}", _speed(mine, labels)]
    if figures.get("failures"):
        parts += [
            "## Servers that did not start, and first requests that failed",
            _failures(figures["failures"], labels),
        ]
    if figures.get("trouble"):
        parts += [
            "## Where two servers do not fit, where P dies, and hybrid models",
            _trouble(figures["trouble"], labels),
        ]
    if figures.get("chat"):
        parts += ["## A chat of several turns", _chat(figures["chat"])]
    return "\n\n".join(parts) + "\n"


def _where(result: Mapping[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"{result['date']}, {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {named}. "
        f"`{result['command']}`. {NOTES}"
    )


def _speed(rows: Sequence[Row], labels: Mapping[str, str]) -> str:
    times, moved = ("handover", "first token", "total"), ("descriptors", "MB", "MB/s")
    columns = ("tokens", "at once", "connector", "legs", *times, *moved, "repeats", "errors", "wrong", "of")
    return _table(columns, (
        (f"{row['prompt_tokens']:,}", row["at_once"], labels[row["connector"]],
         "" if row["connector"] == "alone" else row["legs"],
         *(_times(row, name) for name in ("handover_ms", "first_token_ms", "total_ms")),
         *(_number(row, name) for name in ("descriptors", "megabytes", "megabytes_per_s")),
         row["repeats"], row["errors"], row["wrong"], row["requests"])
        for row in rows
    )) + _causes(rows, labels)  # fmt: skip


def _causes(rows: Sequence[Row], labels: Mapping[str, str]) -> str:
    causes = [
        f"- {labels[row['connector']]}, {row['legs']}, {row['prompt_tokens']:,} tokens, {row['at_once']} at once: "
        f"`{_short(row['error'])}`"
        for row in rows
        if "error" in row
    ]
    return "\n\n" + "\n".join(causes) if causes else ""


def _failures(failures: Mapping[str, Mapping[str, str]], labels: Mapping[str, str]) -> str:
    return _table(("layout and TP", "connector", "reason"), (
        (name, labels[connector], f"`{_short(reason)}`")
        for name, reasons in failures.items() for connector, reason in reasons.items()
    ))  # fmt: skip


def _trouble(cases: Mapping[str, Mapping[str, Row]], labels: Mapping[str, str]) -> str:
    columns = ("case", "connector", "requests", "right", "wrong", "errors", "longest", "handover", "the first error")
    return _table(columns, (
        (case, labels[connector], row.get("requests", "did not start"), row.get("right", ""),
         f"**{row['wrong']}**" if row.get("wrong") else row.get("wrong", ""), row.get("errors", ""),
         f"{row['longest_s']} s" if "longest_s" in row else "", _times(row, "handover_ms"),
         f"`{_short(row['error'])}`" if "error" in row else "")
        for case, rows in cases.items() for connector, row in rows.items()
    ))  # fmt: skip


def _chat(chat: Mapping[str, Any]) -> str:
    if "error" in chat:
        return f"It failed: `{_short(chat['error'])}`"
    return _table(("server", "first token, first turns", "first token, later turns", "answers as without"), (
        (name, _times(server, "first_turn_ms"), _times(server, "later_turns_ms"),
         f"{server['equal']} of {chat['answers']}")
        for name, server in chat["servers"].items()
    ))  # fmt: skip


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _times(row: Row, name: str) -> str:
    return " / ".join(f"{value:.0f}" for value in row[name].values()) if name in row else ""


def _number(row: Row, name: str) -> str:
    value = row.get(name)
    return "" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _short(error: str) -> str:
    """Return the beginning of an error, fit for a cell."""
    words = " ".join(error.replace("`", "'").replace("|", "/").split())
    return words if len(words) <= 160 else words[:157] + "..."
