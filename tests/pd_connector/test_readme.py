"""The pages promise no setting, target or metric that does not exist, and leave none out."""

import json
import re
from pathlib import Path

from pd_connector.config import ConnectorConfig, Tuning
from pd_connector.orders import Cause
from pd_connector.stats import LABELS, metric_names

ROOT = Path(__file__).parents[2]
SETTINGS = (ROOT / "docs" / "settings.md").read_text()
METRICS = (ROOT / "docs" / "metrics.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_settings_table_is_the_configuration() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| (.*) \|$", SETTINGS, re.MULTILINE)
    fields = [
        (name, json.dumps(field.default), field.description)
        for name, field in ConnectorConfig.model_fields.items()
        if name != "tuning"
    ]
    assert rows == fields


def test_what_can_be_tuned_is_named_beside_the_table() -> None:
    (named,) = re.findall(r"^`tuning` is an object .*?\n\n", SETTINGS, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(\w+)`", named)) >= set(Tuning.model_fields)


def test_every_make_target_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = page.read_text()
        named = re.findall(r"^make ([a-z-]+)", text, re.MULTILINE) + re.findall(r"`make ([a-z-]+)", text)
        assert set(named) <= targets, page


def test_every_metric_is_named() -> None:
    stems = {name.removeprefix("vllm:pd_").removeprefix("pull_") for name in metric_names()}
    assert all(stem in METRICS for stem in stems)


def test_what_is_said_of_a_metric_names_all_values_of_its_label() -> None:
    for name, values in LABELS.items():
        (row,) = re.findall(rf"^\| `vllm:pd_{name}_total{{\w+}}` \| .*$", METRICS, re.MULTILINE)
        if name == "prompts_computed":
            (row,) = re.findall(r"^No prompt of a decode leg .*?(?:\n\n|\Z)", METRICS, re.MULTILINE | re.DOTALL)
        named = set(re.findall(r"`(\w+)`", row))
        assert set(values) <= named, name
        assert named & {cause.value for cause in Cause} <= set(values), f"{name} never has such a value"


def test_every_link_to_a_file_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_every_path_of_the_code_that_a_page_names_exists() -> None:
    rooms = "pd_connector|pd_proxy|layout|transfer|tests|examples|benchmarks|docs"
    for page in PAGES:
        for path in re.findall(rf"`((?:{rooms})/[\w./-]+)`", page.read_text()):
            assert (ROOT / path).exists(), f"{page}: {path}"


def test_the_features_of_the_end_to_end_tests_are_listed() -> None:
    registered = re.findall(r'"(\w+): e2e feature: (.*)"', (ROOT / "pyproject.toml").read_text())
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert [(name, text.replace("`", "")) for name, text in rows] == registered
