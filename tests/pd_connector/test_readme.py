"""The README promises no setting, target or metric that does not exist, and leaves none out."""

import json
import re
from pathlib import Path

from pd_connector.config import ConnectorConfig
from pd_connector.stats import metric_names

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_settings_table_is_the_configuration() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| (.*) \|$", README, re.MULTILINE)
    fields = [
        (name, json.dumps(field.default), field.description) for name, field in ConnectorConfig.model_fields.items()
    ]
    assert rows == fields


def test_every_make_target_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", README)) <= targets


def test_every_metric_is_named() -> None:
    stems = {name.removeprefix("vllm:pd_").removeprefix("pull_") for name in metric_names()}
    assert all(stem in README for stem in stems)
