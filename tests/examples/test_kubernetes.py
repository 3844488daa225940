"""The manifests of examples/kubernetes agree with Kubernetes' schemas, vLLM, the connector, and each other."""

import copy
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]

from pd_connector.config import ConnectorConfig, parse_config
from pd_proxy.__main__ import parse
from tests.support.examples.manifests import (
    DIRECTORY,
    FILES,
    Manifest,
    Workload,
    kustomization,
    manifests,
    may_connect,
    selects,
)
from tests.support.sources import ROOT

#: The first one with port ranges in network policies, and the newest that the validator knows.
VERSIONS = ("1.25", ".".join(kubernetes_validate.latest_version().split(".")[:2]))
P, D, PROXY = (Workload.of(leg) for leg in ("prefill", "decode", "proxy"))
ENGINES = pytest.mark.parametrize("engine", [P, D], ids=["prefill", "decode"])
WORKLOADS = pytest.mark.parametrize("workload", [P, D, PROXY], ids=["prefill", "decode", "proxy"])


def title(manifest: Manifest) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def connector(workload: Workload) -> ConnectorConfig:
    """The connector's settings, checked as it checks them itself."""
    return parse_config(workload.transfer_config["kv_connector_extra_config"])


# Schemas


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", manifests(), ids=title)
def test_a_manifest_follows_the_schema(manifest: Manifest, version: str) -> None:
    assert kubernetes_validate.validate(manifest, version, strict=True) == version


@pytest.mark.parametrize(
    "break_it",
    [
        lambda it: it["spec"]["template"]["spec"]["containers"][0].update(imagePullPolice="Always"),
        lambda it: it["spec"].update(replicas="two"),
        lambda it: it["spec"].pop("selector"),
    ],
    ids=["unknown field", "wrong type", "missing field"],
)
def test_a_manifest_that_is_wrong_would_be_noticed(break_it: Any) -> None:
    broken = copy.deepcopy(P.manifest)
    break_it(broken)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


def test_kustomize_takes_every_file() -> None:
    assert sorted(kustomization()["resources"]) == [path.name for path in FILES]
    assert len(manifests()) == 10


def test_names_are_used_once() -> None:
    titles = [title(one) for one in manifests()]
    assert len(set(titles)) == len(titles)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, without a cluster")
def test_kubectl_builds_what_follows_the_schema_too(tmp_path: Path) -> None:
    directory = tmp_path / "kubernetes"
    shutil.copytree(DIRECTORY, directory)
    (directory / "secret").write_text("a secret of 31 printable bytes.")
    built = subprocess.run(["kubectl", "kustomize", directory], capture_output=True, text=True, timeout=60, check=True)
    found = list(yaml.safe_load_all(built.stdout))
    assert len(found) == len(manifests()) + 2
    for manifest in found:
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)
    (secret,) = [one["metadata"]["name"] for one in found if one["kind"] == "Secret"]
    assert len(re.findall(rf"secretKeyRef:\n +key: secret\n +name: {secret}\n", built.stdout)) == 2
    assert built.stdout.count("image: registry.example.com/pd-connector:0.1.0\n") == 3
    assert "image: pd-connector\n" not in built.stdout


# Selectors and names


@WORKLOADS
def test_a_deployment_selects_its_own_pods_and_no_others(workload: Workload) -> None:
    selector = workload.manifest["spec"]["selector"]["matchLabels"]
    assert [one for one in (P, D, PROXY) if selects(selector, one.labels)] == [workload]


@pytest.mark.parametrize("service", manifests("Service"), ids=title)
def test_a_service_selects_one_deployment_and_names_ports_that_it_has(service: Manifest) -> None:
    (workload,) = [one for one in (P, D, PROXY) if selects(service["spec"]["selector"], one.labels)]
    assert service["metadata"]["name"].startswith(workload.manifest["metadata"]["name"])
    for port in service["spec"]["ports"]:
        assert port["port"] == workload.ports[port["targetPort"]]


@WORKLOADS
def test_what_a_pod_mounts_and_reads_is_there(workload: Workload) -> None:
    volumes = {one["name"] for one in workload.pod.get("volumes", [])}
    assert {one["name"] for one in workload.container.get("volumeMounts", [])} == volumes
    generated = {one["name"] for one in kustomization()["configMapGenerator"]}
    for source in workload.container.get("envFrom", []):
        assert source["configMapRef"]["name"] in generated
    assert workload.container["image"] in {one["name"] for one in kustomization()["images"]}
    assert not [word for word in workload.command if "$(" in word]


@WORKLOADS
def test_service_names_make_no_variables(workload: Workload) -> None:
    assert workload.pod["enableServiceLinks"] is False
    assert workload.pod["automountServiceAccountToken"] is False


# Ports


@ENGINES
def test_an_engine_listens_where_its_container_says(engine: Workload) -> None:
    assert int(engine.option("--port")) == engine.ports["http"]


def test_the_control_port_is_fixed_and_named() -> None:
    assert connector(P).port == P.ports["control"] == 8998
    assert connector(P).port != 0


def test_the_proxy_reaches_both_engines_by_their_services() -> None:
    settings, server = parse(PROXY.command[1:])
    services = {one["metadata"]["name"]: one["spec"]["ports"][0]["port"] for one in manifests("Service")}
    assert settings.prefill == (f"http://pd-prefill:{services['pd-prefill']}",)
    assert settings.decode == (f"http://pd-decode:{services['pd-decode']}",)
    assert (server.host, server.port) == ("0.0.0.0", PROXY.ports["http"])
    assert PROXY.command[0] == "pd-proxy"
    assert settings.without_prefill == "decode", "D may compute prompts: its policy is recompute"


def data_ports(engine: Workload) -> range:
    """The ports between which an engine's transfer engines choose."""
    return range(int(engine.environment["MC_MIN_RPC_PORT"]), int(engine.environment["MC_MAX_RPC_PORT"]) + 1)


def test_only_what_must_connect_can() -> None:
    everybody = {"P": P.labels, "D": D.labels, "proxy": PROXY.labels, "a stranger": None}
    interesting = {*range(14990, 17010), 80, 8000, 8100, 8200, 8997, 8998, 8999, 1, 65535}

    def open_ports(source: str, target: Workload) -> set[int]:
        return {port for port in interesting if may_connect(everybody[source], target.labels, port)}

    http, control = {P.ports["http"]}, {P.ports["control"]}
    assert open_ports("proxy", P) == http
    assert open_ports("D", P) == control | {*data_ports(P)}
    assert open_ports("P", P) == open_ports("a stranger", P) == set()
    assert open_ports("proxy", D) == {D.ports["http"]}
    assert open_ports("P", D) == {*data_ports(D)}
    assert open_ports("D", D) == open_ports("a stranger", D) == set()
    for source in everybody:
        assert open_ports(source, PROXY) == {PROXY.ports["http"]}


# Probes and the end


@WORKLOADS
def test_probes_ask_what_the_server_has(workload: Workload) -> None:
    for name, probe in workload.probes.items():
        assert probe["httpGet"]["port"] == "http"
        asks_others = workload is PROXY and name == "readiness"
        expected = "/health" if workload is not PROXY or asks_others else "/healthcheck"
        assert probe["httpGet"]["path"] == expected


@ENGINES
def test_a_model_has_time_to_load(engine: Workload) -> None:
    startup = engine.probes["startup"]
    load_s = startup["periodSeconds"] * startup["failureThreshold"]
    assert load_s >= 1800
    # A rollout that takes longer is reported as failed, though it goes on.
    ends_s = engine.pod["terminationGracePeriodSeconds"]
    assert engine.manifest["spec"].get("progressDeadlineSeconds", 600) > ends_s + load_s


def test_the_proxys_readiness_waits_longer_than_the_proxy_for_a_server() -> None:
    assert PROXY.probes["readiness"]["timeoutSeconds"] > parse(PROXY.command[1:])[0].connect_timeout_s


def test_a_busy_d_does_not_take_the_proxy_out_of_its_service() -> None:
    """It waits for D's health less long than D's own probe does."""

    def patience_s(workload: Workload) -> int:
        probe = workload.probes["readiness"]
        return int(probe["periodSeconds"] * probe["failureThreshold"])

    assert patience_s(PROXY) > 2 * patience_s(D)


def test_p_has_time_to_drain_before_vllm_and_kubernetes_kill_it() -> None:
    shutdown_s = int(P.option("--shutdown-timeout"))
    drain_s = connector(P).drain_timeout_s
    assert drain_s == 20  # not the default: what is written there is what is meant
    assert "ends 3 s before it" in (ConnectorConfig.model_fields["drain_timeout_s"].description or "")
    assert shutdown_s > drain_s + 3
    assert P.pod["terminationGracePeriodSeconds"] >= P.pre_stop_s + shutdown_s + 10


@pytest.mark.parametrize("workload", [D, PROXY], ids=["decode", "proxy"])
def test_answers_under_way_have_time_to_end(workload: Workload) -> None:
    shutdown_s = int(workload.option("--shutdown-timeout"))
    assert shutdown_s >= 60
    assert workload.pod["terminationGracePeriodSeconds"] >= workload.pre_stop_s + shutdown_s + 10


# The connector and vLLM


@pytest.mark.parametrize(("engine", "role"), [(P, "kv_producer"), (D, "kv_consumer")], ids=["prefill", "decode"])
def test_the_connector_takes_its_settings(engine: Workload, role: str) -> None:
    given = engine.transfer_config
    assert (given["kv_connector"], given["kv_connector_module_path"]) == ("PDConnector", "pd_connector")
    assert given["kv_role"] == role
    assert connector(engine).protocol == "tcp"


@ENGINES
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in what vLLM imports
def test_vllm_takes_the_arguments(engine: Workload) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser  # noqa: PLC0415  seconds
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    assert engine.command[:2] == ["vllm", "serve"]
    options = make_arg_parser(FlexibleArgumentParser()).parse_args(engine.command[2:])
    assert (options.model_tag, options.port) == ("Qwen/Qwen3-8B", engine.ports["http"])
    assert options.shutdown_timeout == int(engine.option("--shutdown-timeout"))


def test_both_engines_serve_the_same_model() -> None:
    own = ("--port", "--shutdown-timeout", "{")
    shared = [[word for word in engine.command if not word.startswith(own)] for engine in (P, D)]
    assert shared[0] == shared[1]


@ENGINES
def test_an_engine_tells_others_its_pods_address(engine: Workload) -> None:
    (host,) = [one for one in engine.container["env"] if one["name"] == "VLLM_HOST_IP"]
    assert host["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert connector(engine).host is None


def test_d_pulls_from_ps_pods_only() -> None:
    allowed = connector(D).allowed_peers
    assert allowed == ["pd-prefill-pods"]
    (service,) = [one["spec"] for one in manifests("Service") if one["metadata"]["name"] == "pd-prefill-pods"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True  # a pod that drains is not ready
    assert selects(service["selector"], P.labels)


# Secrets


@ENGINES
def test_the_secret_is_in_the_environment(engine: Workload) -> None:
    """A Secret's files belong to root, and the connector takes none that others may read."""
    (generator,) = kustomization()["secretGenerator"]
    (variable,) = [one for one in engine.container["env"] if one["name"] == "PD_CONNECTOR_SECRET"]
    (key,) = generator["files"]
    assert variable["valueFrom"] == {"secretKeyRef": {"name": generator["name"], "key": key}}
    assert connector(engine).secret_file is None  # with both, the connector does not start


@WORKLOADS
def test_nothing_runs_as_root(workload: Workload) -> None:
    """As the image's user, which owns the directory that it begins in."""
    assert workload.pod["securityContext"]["runAsNonRoot"] is True
    assert "runAsUser" not in {**workload.pod["securityContext"], **workload.container["securityContext"]}
    assert workload.container["securityContext"]["allowPrivilegeEscalation"] is False


def test_the_secret_is_made_from_a_file_that_is_not_under_version_control() -> None:
    (generator,) = kustomization()["secretGenerator"]
    assert generator == {"name": "pd-connector", "files": ["secret"]}
    assert not (DIRECTORY / "secret").exists()
    assert "/secret" in (DIRECTORY / ".gitignore").read_text().splitlines()
    # Whoever packs asks no git; nor does who builds an image, see tests/deploy.
    assert "exclude examples/kubernetes/secret" in (ROOT / "MANIFEST.in").read_text().splitlines()


@WORKLOADS
def test_all_share_an_api_key_that_may_be_missing(workload: Workload) -> None:
    (key,) = [one for one in workload.container["env"] if one["name"] == "VLLM_API_KEY"]
    assert key["valueFrom"] == {"secretKeyRef": {"name": "pd-api-key", "key": "api-key", "optional": True}}


def test_the_proxy_has_no_rights() -> None:
    own = PROXY.container["securityContext"]
    assert own["readOnlyRootFilesystem"] is True
    assert own["capabilities"] == {"drop": ["ALL"]}


def test_the_readme_says_what_was_not_done() -> None:
    text = re.sub(r"\s+", " ", (DIRECTORY / "README.md").read_text())
    assert "not been run in a cluster" in text


def test_what_the_readme_has_one_type_is_of_the_deployments_namespace() -> None:
    commands = re.findall(r"kubectl [^`]+", (DIRECTORY / "README.md").read_text())
    assert len(commands) >= 4
    assert [one for one in commands if "-n NAMESPACE" not in " ".join(one.split())] == []
