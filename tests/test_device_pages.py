"""docs/npu.md and docs/cuda.md quote messages that the code has, and install what pyproject.toml declares."""

import ast
import re
import tomllib
from functools import cache

import pytest
from packaging.requirements import Requirement

from tests.support.e2e.cuda_deployments import FALLBACKS, OWN_STREAM, TOGETHER
from tests.support.sources import ROOT

NPU, CUDA = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("npu", "cuda"))
#: Of docs/cuda.md, but for its generated table, which grows with the cards.
MOST_WORDS = 950
PACKAGES = ("layout", "transfer", "pd_connector")

#: What stands for values in quoted messages, and where a message begins in the middle of another.
_VALUES = re.compile(
    r"\.\.\.|\b(?:N|NAME)\b|0x|'ascend'|\b\d+\b(?!\.\d)|libascendcl\.so|libcuda\.so\.1|aclrt\w+|cuMemcpyBatchAsync.*"
    r"|\bapart: |cannot register the |bytes: |CUDA 13; "
)
_FORMAT = re.compile(r"%[-\d.]*[a-z]")


@cache
def texts() -> frozenset[str]:
    """All strings of the packages, cut where they have values."""
    found: set[str] = set()
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.update(_FORMAT.split(node.value))
    return frozenset(found)


def quoted(page: str, heading: str) -> list[str]:
    """The messages that a section's list explains: what stands before the first colon behind a message."""
    section = re.split(r"^## ", page, flags=re.MULTILINE)
    (wanted,) = [part for part in section if part.startswith(heading)]
    entries = re.sub(r"\n  ", " ", wanted).splitlines()
    rows = [line.split("`: ")[0] + "`" for line in entries if line.startswith("- `")]
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize(
    "message", [*quoted(NPU, "5. What the servers say"), *quoted(CUDA, "5. What doctor and servers say")]
)
def test_a_message_that_is_quoted_is_one_of_the_codes(message: str) -> None:
    fragments = [fragment.strip(" :,()=") for fragment in _VALUES.split(message)]
    fixed = [fragment for fragment in fragments if len(fragment) >= len("in runs")]
    assert fixed, "nothing of it could be looked for"
    missing = [fragment for fragment in fixed if not any(fragment in text for text in texts())]
    assert not missing


@pytest.mark.parametrize("words", [TOGETHER, OWN_STREAM, *FALLBACKS])
def test_what_the_tests_on_a_gpu_look_for_in_logs_is_what_the_code_says(words: str) -> None:
    assert any(words in text for text in texts())


def test_a_message_that_the_code_does_not_have_would_be_noticed() -> None:
    assert not any("layers are allocated on the moon" in text for text in texts())
    assert any("layers are allocated together" in text for text in texts())


def test_what_is_installed_in_vllm_ascends_image_leaves_vllm_ascend_as_it_is() -> None:
    """The extra would bring it, and Mooncake's wheel is put in the place of the image's."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["npu"]
    (mooncake,) = [line for line in extra if line.startswith("mooncake")]
    assert f"```\npip install .  # torch and vLLM stay\npip install --no-deps '{mooncake}'\n```\n" in NPU


def test_the_page_of_cuda_names_the_extras_and_is_short() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("cuda", "cuda12"):
        (mooncake,) = [line for line in extras[extra] if line.startswith("mooncake")]
        name, _, oldest = mooncake.partition(">=")
        assert f"'.[{extra}]'" in CUDA
        assert re.search(rf"^\| Mooncake, from {oldest} \|.* {name} \|", CUDA, re.MULTILINE)
    prose = re.sub(r"<!-- generated: .*?<!-- generated: end -->", "", CUDA, flags=re.DOTALL)
    assert len([word for word in prose.split() if re.search(r"\w", word)]) <= MOST_WORDS


def test_make_test_cuda_installs_a_vllm_that_the_extra_takes() -> None:
    (wanted,) = re.findall(r"^VLLM_CUDA \?= (vllm==[\d.]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (declared,) = [
        Requirement(line)
        for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["cuda"]
        if line.startswith("vllm")
    ]
    assert declared.specifier.contains(wanted.partition("==")[2])
