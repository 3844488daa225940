"""The component of examples/kubernetes that is a pool agrees with Kubernetes' schemas, Mooncake, and the engines."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]

from pd_connector.config import parse_config
from tests.support.examples.manifests import DIRECTORY, Manifest, build_with, pool_manifests, selects

MASTER, SERVICE, CLIENT = pool_manifests()
README = (DIRECTORY / "README.md").read_text()
#: Of kv_connector_extra_config, as README.md and the component say it.
SETTINGS = '"cpu_bytes_to_use": 17179869184, "pool": "$(VLLM_HOST_IP):50052"'


def pod(workload: Manifest) -> Manifest:
    found: Manifest = workload["spec"]["template"]["spec"]
    return found


def options(workload: Manifest) -> dict[str, str]:
    (container,) = pod(workload)["containers"]
    return dict(word.removeprefix("--").split("=", 1) for word in container["args"])


@pytest.mark.parametrize("manifest", [MASTER, SERVICE, CLIENT], ids=["master", "service", "client"])
@pytest.mark.parametrize("version", ["1.25", ".".join(kubernetes_validate.latest_version().split(".")[:2])])
def test_a_manifest_follows_the_schema(manifest: Manifest, version: str) -> None:
    assert kubernetes_validate.validate(manifest, version, strict=True) == version


@pytest.mark.parametrize("workload", [MASTER, CLIENT], ids=["master", "client"])
def test_mooncake_has_the_options(workload: Manifest) -> None:
    (container,) = pod(workload)["containers"]
    (program,) = container["command"]
    asked = subprocess.run([str(Path(sys.executable).with_name(program)), "--help"], capture_output=True, text=True)  # noqa: PLW1510  gflags ends with 1
    assert set(options(workload)) <= set(re.findall(r"^ +-(\w+) ", asked.stdout, re.MULTILINE))
    assert selects(workload["spec"]["selector"]["matchLabels"], workload["spec"]["template"]["metadata"]["labels"])


def test_the_image_has_the_libraries_of_the_system_that_mooncake_is_linked_with() -> None:
    (image,) = re.findall(r"^   FROM .*?\n\n", README, re.MULTILINE | re.DOTALL)
    assert {"libibverbs1", "libnuma1", "libcurl4"} <= set(image.split())


def test_the_client_reaches_the_master_by_its_service() -> None:
    (port,) = SERVICE["spec"]["ports"]
    assert options(CLIENT)["master_server_address"] == f"{SERVICE['metadata']['name']}:{port['port']}"
    assert selects(SERVICE["spec"]["selector"], MASTER["spec"]["template"]["metadata"]["labels"])
    assert (
        options(MASTER)["rpc_port"]
        == str(port["port"])
        == str(pod(MASTER)["containers"][0]["ports"][0]["containerPort"])
    )


def test_what_an_interrupted_put_held_is_released_after_it_is_given_up() -> None:
    given = options(MASTER)
    assert int(given["put_start_release_timeout_sec"]) > int(given["put_start_discard_timeout_sec"])


def test_the_client_has_more_memory_than_it_gives() -> None:
    given, limit = options(CLIENT)["global_segment_size"], pod(CLIENT)["containers"][0]["resources"]["limits"]["memory"]
    assert int(given.removesuffix("GB")) < int(limit.removesuffix("Gi"))


def test_the_settings_name_the_nodes_client() -> None:
    for text in (README, (DIRECTORY / "pool" / "kustomization.yaml").read_text()):
        assert SETTINGS in text
    config = parse_config(yaml.safe_load("{" + SETTINGS.replace("$(VLLM_HOST_IP)", "10.0.0.1") + "}"))
    assert str(config.pool) == f"10.0.0.1:{options(CLIENT)['port']}"
    assert options(CLIENT)["host"] == "$(HOST_IP)"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, without a cluster")
def test_with_the_component_engines_are_in_the_network_namespace_of_their_client(tmp_path: Path) -> None:
    built = build_with("pool", tmp_path)
    found: list[Any] = list(yaml.safe_load_all(built))
    on_host = {
        one["metadata"]["name"]: pod(one).get("dnsPolicy")
        for one in found
        if one["kind"] in ("Deployment", "DaemonSet") and pod(one).get("hostNetwork")
    }
    # With another policy, they cannot look up a Service.
    assert on_host == dict.fromkeys(("pd-prefill", "pd-decode", "pd-pool-client"), "ClusterFirstWithHostNet")
    assert built.count("image: registry.example.com/mooncake:0.3.13.post1\n") == 2
    for manifest in found:
        kubernetes_validate.validate(manifest, "1.25", strict=True)
