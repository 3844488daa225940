"""Tables of docs/benchmarks.md and docs/fleet.md, made from the results' files."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks import record

WAYS = {
    "ours, together": "pd-connector, at once", "ours, in turn": "in turn",
    "mooncake, together": "Mooncake, at once", "mooncake, in turn": "in turn", "nixl, in turn": "NIXL, in turn",
}  # fmt: skip
#: What is said of transfers that no other table has: what it is, the form of what was measured, and where that stands.
TRANSFERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("first token with `--first-token prefill`, beside P alone", "{:.2f} times", ("first_token:1000/ratio",)),
    (
        "the proxy's processor time for a request, both legs, 1,000 at once", "{:.1f} ms, in turn {:.1f}",
        ("proxy:together/1000/request_ms", "proxy:in-turn/1000/request_ms"),
    ),
    (
        "the same for a streamed chunk, 100 at once", "{:.2f} ms, in turn {:.2f}",
        ("proxy:together/100/chunk_ms", "proxy:in-turn/100/chunk_ms"),
    ),
    (
        "layers together, TP 2 to 1, beside one contiguous read", "{:.1f} times",
        ("unequal:BHLNC, TP 2 to 1, scattered, planned/ratio",),
    ),
    (
        "layers apart, TP 2 to 1, adjacent blocks", "{:.1f} times, directly {:.1f}",
        ("unequal:LBHNC, TP 2 to 1, adjacent, planned/ratio", "unequal:LBHNC, TP 2 to 1, adjacent, direct/ratio"),
    ),
    ("layers apart, TP 1 to 2", "{:.1f} times", ("unequal:LBHNC, TP 1 to 2, scattered, planned/ratio",)),
    (
        "65 MiB of a hybrid's states, beside one contiguous read", "{:.2f} times, TP 2 to 1 {:.2f}, 1 to 2 {:.2f}",
        ("states:TP 1 to 1/ratio", "states:TP 2 to 1/ratio", "states:TP 1 to 2/ratio"),
    ),
    (
        "handover of a hybrid, both legs at once, 64 and 3,500 tokens", "{:.0f} and {:.0f} ms",
        ("legs_hybrid:handover/64/together_ms", "legs_hybrid:handover/3500/together_ms"),
    ),
    (
        "a plan for 131,072 tokens, TP 2 to 1, layers together", "{:.1f} ms",
        ("planning:BHLNC 131072 tokens TP 2 to 1 fragmented/sum_ms",),
    ),
    (
        "the same with layers apart, nothing adjacent", "{:.1f} ms",
        ("planning:LBHNC 131072 tokens TP 2 to 1 fragmented/sum_ms",),
    ),
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
            handover = f", handover {_handover(found)} ms" if "handover_ms" in found else ""
            cells.append(f"{', '.join(counts)}, {found['longest_s']:g} s{handover}")
        rows.append([event, *cells])
    return _table(["what happens", "pd-connector", "MooncakeConnector", "NixlConnector"], rows)


def serving() -> str:
    """Return goodput and latency under vLLM's load generator."""
    rows = [
        [
            rate, servers, f"{found['request_goodput']:.2f}", _ms(found["ttft_ms"]), _ms(found["tpot_ms"]),
            found["failed"],
        ]
        for rate, ways in _figures("serving")["rates"].items() for servers, found in ways.items()
    ]  # fmt: skip
    head = ["requests a second", "servers", "goodput", "first token, ms", "later tokens, ms", "failed"]
    return _table(head, rows)


def _ms(percentiles: Mapping[str, float]) -> str:
    return f"{percentiles['p50']:,.0f} / {percentiles['p90']:,.0f}"


def transfers() -> str:
    """Return what was measured of transfers."""
    rows = [[what, form.format(*(record.figure(place) for place in places))] for what, form, places in TRANSFERS]
    return _table(["what", "measured"], rows)


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


def fleet_host_memory() -> str:
    """Return how long a burst of requests takes, with host memory and without."""
    found = _figures("fleet")["host_memory"]
    rows = [
        [
            f"{link} Gb/s",
            *(
                f"{ways['device only'][key]:.0f} / {ways['host memory'][key]:.0f}"
                for key in ("prefilled_s", "seconds", "failed")
            ),
        ]
        for link, ways in found["links"].items()
    ]
    head = [f"{found['requests']} at once, device only / host memory", "computed, s", "answered, s", "failed"]
    return _table(head, rows)


def fleet_control() -> str:
    """Return what P's control server takes for a message, and how busy a thousand decode engines keep it."""
    control = _figures("fleet")["control"]
    names = {
        "renew": "renewal of one lease", "renew_many": "renewal of a hundred", "follow": "`follow`",
        "release": "release", "hello": "welcome, eight workers",
    }  # fmt: skip
    rows = [[text, f"{control['cost_us'][name]:.0f} us"] for name, text in names.items()]
    rows += [
        ["1,000 D that share one P's requests", f"busy {control['shared']['busy']['1000']:.0%}"],
        [f"{control['each']['requests_per_s']:g} requests/s from each", f"busy {control['each']['busy']['1000']:.0%}"],
        ["welcome of 1,000 D after a restart", f"{control['hello_of_1000_s']:.1f} s"],
    ]
    return _table(["what", "P's control server"], rows)


def _figures(name: str) -> Any:
    return record.read(name)["figures"]


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)
