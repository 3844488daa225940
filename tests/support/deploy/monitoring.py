"""What ``deploy/`` has for Prometheus and Grafana, and the tools that check it."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pd_connector.stats import COUNTERS, GAUGES, GAUGES_OF_RANKS, LABELLED
from tests.support.sources import ROOT

PROMETHEUS_FILES = ROOT / "deploy" / "prometheus"
DASHBOARD_FILE = ROOT / "deploy" / "grafana" / "pd-connector.json"

#: A test that needs Debian's package of Prometheus, which has promtool too.
needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="Prometheus and promtool are not installed (Debian, Ubuntu: apt-get install prometheus)",
)


def metric_names() -> list[str]:
    """The names of all metrics of the connector, without Prometheus' suffixes."""
    seconds = ("pull_seconds", "host_copy_seconds", "connector_call_seconds_max")
    return [f"vllm:pd_{name}" for name in (*COUNTERS, *LABELLED, *GAUGES, *GAUGES_OF_RANKS, *seconds)]


@dataclass(frozen=True)
class Query:
    """A query of a panel."""

    panel: str
    expression: str

    def asked(self, window: str = "1m", instance: str = ".*") -> str:
        """The expression with Grafana's variables in their places."""
        return self.expression.replace("$__rate_interval", window).replace("$instance", instance)


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD_FILE.read_text())
    return loaded


def queries() -> list[Query]:
    """All queries of the dashboard."""
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    return [Query(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]


def metrics_of(expression: str) -> set[str]:
    """The names of the metrics in an expression, also those given as ``__name__``."""
    return set(re.findall(r"((?:vllm:|\bpd_proxy_)\w+)", expression)) | set(re.findall(r"\b(up)\{", expression))


def promtool(*arguments: str, cwd: Path = PROMETHEUS_FILES) -> str:
    """What promtool says, which must be content."""
    done = subprocess.run(["promtool", *arguments], cwd=cwd, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
