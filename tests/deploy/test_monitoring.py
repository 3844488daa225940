"""Dashboard and alert rules: well-formed, about metrics that exist, and each alert tried by promtool."""

import re
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from pd_connector.stats import LABELS, PHASES
from pd_connector.worker.quarantine import MAX_AGE_S
from pd_proxy.journal import Journal
from tests.support.deploy.monitoring import (
    PROMETHEUS_FILES,
    dashboard,
    metric_names,
    metrics_of,
    needs_prometheus,
    promtool,
    queries,
)

#: Of vLLM's own, in all releases that are supported.
VLLMS = {"vllm:time_to_first_token_seconds", "vllm:num_requests_waiting", "vllm:prompt_tokens_by_source"}

ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load((PROMETHEUS_FILES / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}

#: Those of whose events a query asks for some.
EVENTS = ("leases", "transfers", "host_bytes", "host_failures", "pool_prompts")


def known_metrics() -> set[str]:
    """Every name that is exported, with Prometheus' suffixes."""
    proxys = set(re.findall(r"^# TYPE (\w+)", Journal().exposition([]), re.MULTILINE))
    stems = {*metric_names(), *VLLMS, *proxys}
    return {"up"} | {stem + suffix for stem in stems for suffix in ("", "_total", "_sum", "_count", "_bucket")}


def test_every_query_is_about_metrics_that_exist() -> None:
    expressions = [query.expression for query in queries()] + [str(rule["expr"]) for rule in ALERTS.values()]
    for expression in expressions:
        assert metrics_of(expression), expression
        assert metrics_of(expression) <= known_metrics(), expression


def test_the_dashboard_shows_every_metric_of_the_connector() -> None:
    shown = set[str]().union(*(metrics_of(query.expression) for query in queries()))
    missing = [name for name in metric_names() if not any(re.match(rf"{name}(_total|_bucket)?$", one) for one in shown)]
    assert missing == []


def test_labels_that_are_asked_for_exist() -> None:
    expressions = [query.expression for query in queries()] + [str(rule["expr"]) for rule in ALERTS.values()]
    known = {
        "cause": {*LABELS["pull_failures"], *LABELS["control_refusals"], *LABELS["prompts_computed"]},
        "event": {event for name in EVENTS for event in LABELS[name]},
        "phase": set(PHASES),
        "outcome": set(LABELS["canaries"]),
    }
    for expression in expressions:
        for label, values in re.findall(r'\b(cause|event|phase|outcome)=~?"([^"]+)"', expression):
            assert set(values.split("|")) <= known[label], expression


def test_every_cause_of_failure_has_an_alert() -> None:
    rules = [rule["expr"] for rule in ALERTS.values() if "pull_failures" in rule["expr"]]
    alerted = [values for rule in rules for values in re.findall(r'cause=~?"([^"]+)"', rule)]
    assert set("|".join(alerted).split("|")) == set(LABELS["pull_failures"])


def test_panels_do_not_overlap_and_say_what_they_show() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        x, y, width, height = (panel["gridPos"][name] for name in "xywh")
        cells = {(x + across, y + down) for across in range(width) for down in range(height)}
        assert not taken & cells, panel["title"]
        assert x + width <= 24
        taken |= cells
        assert panel["type"] == "row" or panel["description"].endswith(".")
    numbers = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("critical", "warning"), name
        assert set(rule["annotations"]) == {"summary", "description"}, name


def test_an_alert_tells_the_workers_time_limit() -> None:
    assert f"in {MAX_AGE_S:g} s, the worker ends" in ALERTS["PDQuarantine"]["annotations"]["description"]


def test_every_alert_is_tried() -> None:
    tests = (PROMETHEUS_FILES / "alerts_test.yml").read_text()
    for name in ALERTS:
        fires = f'alertname="{name}", alertstate="firing"' in tests or f"alertname: {name}\n        exp_alerts" in tests
        assert fires, f"no test lets {name} fire"
        assert f"alertname: {name}}}" in tests, f"no test has {name} keep quiet"


@needs_prometheus
def test_promtool_accepts_the_files() -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", "alerts.yml")
    assert "is valid prometheus config file" in promtool("check", "config", "prometheus.yml")


@needs_prometheus
def test_alerts_fire_when_they_should() -> None:
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")


@needs_prometheus
def test_promtool_accepts_every_query_of_the_dashboard(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": query.asked()} for number, query in enumerate(queries())]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(file))
