"""A real Prometheus on this machine, with the rules of ``deploy/``."""

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx
import yaml  # type: ignore[import-untyped]

from tests.support.deploy.monitoring import PROMETHEUS_FILES
from tests.support.process import free_port
from tests.support.waiting import until


class Prometheus:
    """Scrapes targets by the names of their jobs every second. Leaving the context ends it."""

    def __init__(self, directory: Path, targets: Mapping[str, str]) -> None:
        shutil.copy(PROMETHEUS_FILES / "alerts.yml", directory)
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["alerts.yml"],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in targets.items()
            ],
        }
        file = directory / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        port = free_port()
        command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={directory / 'data'}"]
        self._log = (directory / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=self._log, stderr=subprocess.STDOUT
        )
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30)
        until(self._is_ready, "Prometheus is ready")

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What an expression returns now: a list of labels and values."""
        answer = self._http.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", answer
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def value(self, expression: str) -> float:
        """The sum of what an expression returns now."""
        return sum(float(one["value"][1]) for one in self.query(expression))

    def firing(self) -> dict[str, list[dict[str, str]]]:
        """The labels of the alerts that fire, by name."""
        alerts = self._http.get("/api/v1/alerts").json()["data"]["alerts"]
        found: dict[str, list[dict[str, str]]] = {}
        for alert in alerts:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append(alert["labels"])
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()
        self._http.close()

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, "Prometheus has ended"
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False
