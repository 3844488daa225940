"""The answers as plots. Only here matplotlib is imported. The files are the same for the same results."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLOURS = ("#0b6e4f", "#c1440e", "#3a4a8c")
LINES = {"in turn": "--", "together": "-"}
Figures = Mapping[str, Any]


def draw(figures: Figures, calibration: Figures, directory: Path) -> list[Path]:
    """Write the plots of figures to ``directory``, and return their paths.

    ``calibration``: the results' file of the constants.
    """
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "pd-connector", "svg.fonttype": "none", "font.size": 9})
    mpl.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    caption = _caption(calibration)
    return [
        _split(figures["split"], caption, directory / "fleet-split.svg"),
        _chunks(figures["chunks"], caption, directory / "fleet-chunks.svg"),
    ]


def _split(split: Figures, caption: str, path: Path) -> Path:
    """Requests a second by how many of eight engines prefill."""
    figure, axes = _panels(len(split))
    for axis, (kind, of_kind) in zip(axes, split.items(), strict=True):
        for colour, (output, row) in zip(COLOURS, of_kind["outputs"].items(), strict=False):
            rates = row["requests_per_s"]
            axis.plot([int(each) for each in rates], list(rates.values()), color=colour, marker="o", markersize=4,
                      label=f"answers of {output} tokens")  # fmt: skip
        axis.set_title(f"{kind} engines, prompts of {of_kind['input_tokens']:,} tokens", fontsize=9)
        axis.set_xlabel("P among eight engines; the others are D")
        axis.legend(fontsize=8, frameon=False)
    axes[0].set_ylabel("requests a second, simulated")
    return _save(figure, caption, path)


def _chunks(chunks: Figures, caption: str, path: Path) -> Path:
    """The handover of one request at a time by its length, and first tokens under load by the link's rate."""
    figure, axes = _panels(2)
    for colour, (link, of_link) in zip(COLOURS, chunks["alone"].items(), strict=True):
        for legs, points in of_link.items():
            axes[0].plot([int(each) for each in points], list(points.values()), color=colour, linestyle=LINES[legs],
                         marker="o", markersize=4, label=f"{link} Gb/s, {legs}")  # fmt: skip
    axes[0].set_xscale("log")
    axes[0].set_yscale("log")
    axes[0].set_xlabel("tokens of the prompt")
    axes[0].set_ylabel("ms from P's answer to D's first token")
    axes[0].set_title("assumed engines, one request at a time", fontsize=9)
    axes[0].legend(fontsize=7, frameon=False)
    for number, legs in enumerate(("in turn", "together")):
        rows = [of_link[legs]["first_token_ms"] for of_link in chunks["loaded"].values()]
        places = [place + 0.4 * number for place in range(len(rows))]
        above = [row["p90"] - row["p50"] for row in rows]
        axes[1].bar(places, [row["p50"] for row in rows], 0.36, yerr=[[0.0] * len(rows), above], label=legs,
                    color=COLOURS[0], alpha=(0.55, 1.0)[number], error_kw={"linewidth": 0.8})  # fmt: skip
    axes[1].set_xticks([place + 0.2 for place in range(len(chunks["loaded"]))])
    axes[1].set_xticklabels([f"{link} Gb/s" for link in chunks["loaded"]])
    axes[1].set_ylabel("ms to first token: median, p90")
    axes[1].set_title("assumed engines, 2P2D, 1.2 requests/s", fontsize=9)
    axes[1].legend(fontsize=8, frameon=False)
    return _save(figure, caption, path)


def _panels(count: int) -> tuple[Any, list[Any]]:
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(1, count, figsize=(4.4 * count, 3.4), squeeze=False)
    for axis in axes[0]:
        axis.grid(alpha=0.3)
    return figure, list(axes[0])


def _save(figure: Any, caption: str, path: Path) -> Path:
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.text(0.02, 0.02, caption, fontsize=7, color="#555555")
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return path


def _caption(result: Figures) -> str:
    machine = result["machine"]
    return f"simulated; calibrated on {machine['processor']}, {machine['cores']} cores, {result['date']}"
