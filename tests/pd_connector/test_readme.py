"""The pages promise no setting, target or metric that does not exist, and leave none out.

What is generated of them, ``tests/benchmarks/test_docs.py`` holds to the code.
"""

import json
import re
from pathlib import Path

from pd_connector.config import ConnectorConfig, Tuning, parse_config
from pd_connector.stats import LABELS
from tests.support.deploy.monitoring import metric_names

ROOT = Path(__file__).parents[2]
SETTINGS = (ROOT / "docs" / "settings.md").read_text()
METRICS = (ROOT / "docs" / "metrics.md").read_text()
#: The metrics whose causes the page explains, and the heading of those that the other one has not.
CAUSES = {"pull_failures": "Of failed pulls alone:", "prompts_computed": "Of computed prompts alone:"}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def of_part(page: str, heading: str) -> list[str]:
    """The names that the list behind a heading begins its lines with."""
    (part,) = re.findall(rf"^{heading}\n\n((?:- .*\n)+)", page, re.MULTILINE)
    return re.findall(r"^- `(\w+)`: \S", part, re.MULTILINE)


def test_every_setting_is_listed_with_its_default() -> None:
    rows = re.findall(r"^- `(\w+)` \(`(.*?)`\): \S", SETTINGS, re.MULTILINE)
    defaults = {name: field.default for name, field in ConnectorConfig.model_fields.items()} | {"tuning": {}}
    assert rows == [(name, json.dumps(default)) for name, default in defaults.items()]
    assert all(f"`{name}`" in SETTINGS or f" {name}" in SETTINGS for name in Tuning.model_fields)


def test_readme_is_a_front_door() -> None:
    """Short, with the way to a first pull on its first page."""
    readme = (ROOT / "README.md").read_text()
    assert len(readme.split()) <= 900
    first_page = "\n".join(readme.splitlines()[:60])
    for step in (
        "pip install",
        "pd-doctor",
        "vllm serve",
        "pd-proxy",
        "curl",
        "vllm:pd_pulls_total",
        "docs/security.md",
    ):
        assert step in first_page


def test_engines_start_with_what_the_pages_say() -> None:
    commands = 0
    for page in PAGES:
        for written in re.findall(r"--kv-transfer-config '({\s*\"[^']*})'", page.read_text()):
            if "..." not in written:
                config = json.loads(written)
                assert config["kv_role"] in {"kv_producer", "kv_consumer", "kv_both"}, page
                parse_config(config.get("kv_connector_extra_config", {}))
                commands += 1
    assert commands > 4


def test_every_make_target_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text()
        named = re.findall(r"^make ([a-z-]+)", text, re.MULTILINE) + re.findall(r"`make ([a-z-]+)", text)
        assert set(named) <= targets, page


def test_every_metric_is_named() -> None:
    named = set(re.findall(r"`(vllm:pd_\w+?)(?:_total)?(?:{\w+})?`", METRICS))
    assert named == set(metric_names())


def test_what_is_said_of_a_metric_names_all_values_of_its_label() -> None:
    for name, values in LABELS.items():
        (line,) = re.findall(rf"^- `vllm:pd_{name}_total{{\w+}}`: .*$", METRICS, re.MULTILINE)
        assert name in CAUSES or all(value in line for value in values), name


def test_every_cause_is_explained_where_it_belongs() -> None:
    for name, heading in CAUSES.items():
        listed = [of_part(METRICS, heading), of_part(METRICS, "Of both:")]
        assert sorted(LABELS[name]) == sorted(cause for part in listed for cause in part), name


def test_every_link_to_a_file_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_every_path_of_the_code_that_a_page_names_exists() -> None:
    rooms = "pd_connector|pd_proxy|layout|transfer|tests|examples|benchmarks|docs"
    for page in PAGES:
        for path in re.findall(rf"`((?:{rooms})/[\w./-]+)`", page.read_text()):
            assert (ROOT / path).exists(), f"{page}: {path}"
