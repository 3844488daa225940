"""The manifests of examples/kubernetes, and the questions that tests ask of them."""

import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

from tests.support.sources import ROOT

DIRECTORY = ROOT / "examples" / "kubernetes"
FILES = sorted(path for path in DIRECTORY.glob("*.yaml") if path.name != "kustomization.yaml")
Manifest = dict[str, Any]
Labels = Mapping[str, str]


@cache
def _load() -> tuple[Manifest, ...]:
    return tuple(one for path in FILES for one in yaml.safe_load_all(path.read_text()))


def manifests(kind: str | None = None) -> list[Manifest]:
    """All manifests, or those of a kind. Not to be changed."""
    return [one for one in _load() if kind in (None, one["kind"])]


def named(kind: str, name: str) -> Manifest:
    """The one manifest of that kind and name."""
    (found,) = [one for one in manifests(kind) if one["metadata"]["name"] == name]
    return found


def pool_manifests() -> list[Manifest]:
    """Those of the component that is a pool."""
    return list(yaml.safe_load_all((DIRECTORY / "pool" / "pool.yaml").read_text()))


def prefixes_policy() -> Manifest:
    """That of the component with which P finds prefixes at D."""
    found: Manifest = yaml.safe_load((DIRECTORY / "prefixes" / "network-policy.yaml").read_text())
    return found


def build_with(components: str, directory: Path) -> str:
    """What kubectl makes of the kustomization with ``components``, in an empty ``directory``."""
    copied = shutil.copytree(DIRECTORY, directory / "kubernetes")
    (copied / "secret").write_text("a secret of 31 printable bytes.")
    with (copied / "kustomization.yaml").open("a") as file:
        file.write(f"components: [{components}]\n")
    return subprocess.run(
        ["kubectl", "kustomize", copied], capture_output=True, text=True, timeout=60, check=True
    ).stdout


def kustomization() -> Manifest:
    """What `kubectl apply -k` reads."""
    found: Manifest = yaml.safe_load((DIRECTORY / "kustomization.yaml").read_text())
    return found


@dataclass(frozen=True)
class Workload:
    """A Deployment of one container."""

    manifest: Manifest

    @classmethod
    def of(cls, leg: str) -> "Workload":
        return cls(named("Deployment", f"pd-{leg}"))

    @property
    def labels(self) -> Labels:
        """Of its pods."""
        found: Labels = self.manifest["spec"]["template"]["metadata"]["labels"]
        return found

    @property
    def pod(self) -> Manifest:
        found: Manifest = self.manifest["spec"]["template"]["spec"]
        return found

    @property
    def container(self) -> Manifest:
        (found,) = self.pod["containers"]
        return dict(found)

    @property
    def command(self) -> list[str]:
        """The words of the command line, with the variables of the model's ConfigMap in their places."""
        (generator,) = kustomization()["configMapGenerator"]
        model = dict(literal.split("=", 1) for literal in generator["literals"])
        words: list[str] = self.container["args"]
        for name, value in model.items():
            words = [word.replace(f"$({name})", value) for word in words]
        return words

    def option(self, name: str) -> str:
        """The value of a command line option, given as --name=value."""
        (found,) = [word.partition("=")[2] for word in self.command if word.startswith(f"{name}=")]
        return found

    @property
    def transfer_config(self) -> Manifest:
        """The value of --kv-transfer-config."""
        found: Manifest = json.loads(self.command[self.command.index("--kv-transfer-config") + 1])
        return found

    @property
    def environment(self) -> dict[str, str]:
        """The variables that are given by value."""
        return {one["name"]: one["value"] for one in self.container["env"] if "value" in one}

    @property
    def ports(self) -> dict[str, int]:
        """The container's ports by name."""
        return {one["name"]: one["containerPort"] for one in self.container["ports"]}

    @property
    def probes(self) -> dict[str, Manifest]:
        """The probes by name: startup, readiness, liveness."""
        return {name: self.container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}

    @property
    def pre_stop_s(self) -> int:
        """Seconds that a pod waits before it is told to end."""
        words = self.container["lifecycle"]["preStop"]["exec"]["command"]
        assert words[0] == "sleep"
        return int(words[1])


def selects(selector: Labels, labels: Labels) -> bool:
    """Whether a selector of labels finds what carries ``labels``."""
    return selector.items() <= labels.items()


def may_connect(source: Labels | None, target: Labels, port: int, *more: Manifest) -> bool:
    """Whether the network policies let pods with the labels ``source`` (None: any others) connect to ``target``.

    ``more``: policies of components.

    For policies of the form that is used here: TCP, ingress, peers by labels in the same namespace.
    """
    policies = [one["spec"] for one in (*manifests("NetworkPolicy"), *more)]
    policies = [one for one in policies if selects(one["podSelector"]["matchLabels"], target)]
    if not policies:
        return True
    return any(_is_let_in(rule, source, port) for policy in policies for rule in _rules(policy))


def _rules(policy: Manifest) -> Iterator[Manifest]:
    assert policy["policyTypes"] == ["Ingress"]
    for rule in policy["ingress"]:
        assert rule.keys() <= {"from", "ports"}
        assert rule["ports"]  # none would mean all
        yield rule


def _is_let_in(rule: Manifest, source: Labels | None, port: int) -> bool:
    peers = rule.get("from")
    if peers is not None:
        assert peers  # none would mean everybody
        assert all(peer.keys() == {"podSelector"} for peer in peers)
        if source is None or not any(selects(peer["podSelector"]["matchLabels"], source) for peer in peers):
            return False
    assert all(one["protocol"] == "TCP" for one in rule["ports"])
    return any(one["port"] <= port <= one.get("endPort", one["port"]) for one in rule["ports"])
