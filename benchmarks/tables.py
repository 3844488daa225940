"""Tables of docs/benchmarks.md and docs/fleet.md, made from the results' files."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks import record

WAYS = {
    "ours, together": "pd-connector, at once", "ours, in turn": "in turn",
    "mooncake, together": "Mooncake, at once", "mooncake, in turn": "in turn", "nixl, in turn": "NIXL, in turn",
}  # fmt: skip
#: What is said of transfers that no table has: a sentence with gaps, and where the figures stand that fill them.
TRANSFERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("first token with `--first-token prefill`: {:.2f} times that of P alone", ("first_token:1000/ratio",)),
    (
        "first token of a next turn, if P pulls what D holds: {:.2f} times that if P computes it, {:.2f} times D's "
        "alone",
        ("reuse:first_token_ratio/not looked for", "reuse:first_token_ratio/D alone"),
    ),
    (
        "first token with `--prefill-from auto`, after 32, 120, 480 tokens: {:.2f}, {:.2f}, {:.2f} times the better "
        "way's",
        ("detour:lengths/32/ratio/p50", "detour:lengths/120/ratio/p50", "detour:lengths/480/ratio/p50"),
    ),
    (
        "the proxy's processor time a request, 1,000 at once: {:.1f} ms with legs at once, {:.1f} ms in turn",
        ("proxy:together/1000/request_ms", "proxy:in-turn/1000/request_ms"),
    ),
    (
        "1 Gbit/s: pulls use {:.0%} of the link; legs at once hide {:.0%} of 3,500 tokens",
        ("legs_slow_network:link_share/3500", "legs_slow_network:handover/3500/hidden"),
    ),
    (
        "handover of 2,000 tokens there: {:.0f} ms at once (Mooncake {:.0f}), in turn {:.0f} (Mooncake {:.0f}, "
        "NIXL {:.0f})",
        tuple(
            f"peers_slow_network:cases/LBHNC/1-1/2000/1/{way}/handover_ms/p50"
            for way in ("ours, together", "mooncake, together", "ours, in turn", "mooncake, in turn", "nixl, in turn")
        ),
    ),
    (
        "beside a P whose network is cut: pulls {:.2f} times as long (p99 {:.2f})",
        ("partition:ratio/p50", "partition:ratio/p99"),
    ),
    (
        "first token of a next turn at another P, with D in `peers`: {:.1f} times that of one server; of a new prompt: "
        "{:.1f} times that without",
        ("reuse_two_prefills:first_token_ratio/one server", "reuse_no_hit:first_token_ms/peers/ratio"),
    ),
)  # fmt: skip
#: The same of reads, beside one contiguous read of as many bytes.
READS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("layers together, TP 2 to 1: {:.1f} times", ("unequal:BHLNC, TP 2 to 1, scattered, planned/ratio",)),
    (
        "layers apart, TP 2 to 1, adjacent blocks: {:.1f} times, without staging {:.1f}; TP 1 to 2: {:.1f}",
        (
            "unequal:LBHNC, TP 2 to 1, adjacent, planned/ratio", "unequal:LBHNC, TP 2 to 1, adjacent, direct/ratio",
            "unequal:LBHNC, TP 1 to 2, scattered, planned/ratio",
        ),
    ),
    (
        "a hybrid's states: {:.2f} times; TP 2 to 1: {:.2f}; TP 1 to 2: {:.2f}",
        ("states:TP 1 to 1/ratio", "states:TP 2 to 1/ratio", "states:TP 1 to 2/ratio"),
    ),
    ("2,000 tokens from the pool: {:.1f} times; TP 2 to 1: {:.1f}", ("pool:ratio/TP 1 to 1", "pool:ratio/TP 2 to 1")),
)  # fmt: skip


def peers() -> str:
    """Return the handover beside vLLM's own connectors: a row for each question, a column for each way."""
    rows = []
    for layout, sizes in _figures("peers")["cases"].items():
        for size, lengths in sorted(sizes.items()):
            for tokens, numbers in sorted(lengths.items(), key=lambda each: int(each[0])):
                for at_once, ways in sorted(numbers.items(), key=lambda each: int(each[0])):
                    asked = f"{layout}, TP {size.replace('-', ' to ')}, {int(tokens):,}"
                    asked += "" if at_once == "1" else f", {at_once} at once"
                    rows.append([asked, *(_handover(ways.get(way)) for way in WAYS)])
    return _table(["layout, sizes, tokens", *WAYS.values()], rows)


def _handover(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "does not start"
    if "handover_ms" not in row:
        return "fails"
    failed = f" ({row['errors']} of {row['requests']} failed)" if row["errors"] else ""
    return f"{row['handover_ms']['p50']:.0f}{failed}"


def trouble() -> str:
    """Return what came of requests where two servers do not fit, and where P dies, with the longest of them."""
    rows = []
    for event, connectors in (_figures("peers")["trouble"] | _figures("peers_hybrid")["trouble"]).items():
        cells = []
        for name in ("ours", "mooncake", "nixl"):
            found = connectors.get(name, {})
            if "requests" not in found:
                cells.append("does not start")
                continue
            words = {"right": "right", "wrong": "wrong", "errors": "errors" if found["errors"] > 1 else "error"}
            counts = [f"{found[outcome]} {word}" for outcome, word in words.items() if found[outcome]]
            cells.append(f"{', '.join(counts)}, {found['longest_s']:g} s")
        rows.append([event, *cells])
    return _table(["what happens", "pd-connector", "MooncakeConnector", "NixlConnector"], rows)


def transfers() -> str:
    """Return what was measured of first tokens and of the proxy."""
    return _sentences(TRANSFERS)


def reads() -> str:
    """Return what was measured of reads."""
    return _sentences(READS)


def fleet_split() -> str:
    """Return how many decode engines a prefill engine feeds, by the length of the answers."""
    rows = [
        [
            kind, f"{found['input_tokens']:,}",
            ", ".join(f"{row['decodes_per_prefill']:.2f} ({output})" for output, row in found["outputs"].items()),
        ]
        for kind, found in _figures("fleet")["split"].items()
    ]  # fmt: skip
    return _table(["engines", "tokens of a prompt", "D a P (tokens of an answer)"], rows)


def fleet_chunks() -> str:
    """Return the handover of one request at a time, by the link's rate and the prompt's length."""
    alone = _figures("fleet")["chunks"]["alone"]
    lengths = list(next(iter(alone.values()))["in turn"])
    rows = [
        [f"{link} Gb/s", *(f"{ways['in turn'][each]:,.0f} / {ways['together'][each]:,.0f}" for each in lengths)]
        for link, ways in alone.items()
    ]
    return _table(["in turn / together, ms", *(f"{int(each):,} tokens" for each in lengths)], rows)


def _sentences(said: Iterable[tuple[str, Sequence[str]]]) -> str:
    return "\n".join(f"- {text.format(*(record.figure(place) for place in places))}" for text, places in said)


def _figures(name: str) -> Any:
    return record.read(name)["figures"]


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    head_line, *lines = (f"| {' | '.join(map(str, line))} |" for line in (head, *rows))
    return "\n".join((head_line, "|---" * len(head) + "|", *lines))
