"""With the component of examples/kubernetes for prefixes, P reaches D's control port, and nothing else is opened."""

import json
import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]

from pd_connector.config import parse_config
from tests.support.examples.manifests import DIRECTORY, Workload, build_with, may_connect, prefixes_policy

P, D, PROXY = (Workload.of(leg) for leg in ("prefill", "decode", "proxy"))
COMPONENT = (DIRECTORY / "prefixes" / "kustomization.yaml").read_text()
#: What is added to kv_connector_extra_config, as README.md and the component say it.
OF_D, OF_P = '"serve_prefixes": true, "port": 8999', '"peers": ["readers"]'


def test_p_alone_reaches_ds_control_port() -> None:
    everybody = {"P": P.labels, "D": D.labels, "proxy": PROXY.labels, "a stranger": None}
    ports = [1, 80, 8000, 8100, 8200, 8998, 8999, 9000, 15000, 17000, 65535]
    opened = {
        (name, target.manifest["metadata"]["name"], port)
        for name, labels in everybody.items()
        for target in (P, D, PROXY)
        for port in ports
        if may_connect(labels, target.labels, port, prefixes_policy()) != may_connect(labels, target.labels, port)
    }
    assert opened == {("P", "pd-decode", 8999)}


def test_the_settings_make_d_serve_at_that_port_and_p_ask_it() -> None:
    for text in ((DIRECTORY / "README.md").read_text(), COMPONENT):
        assert OF_D in text
        assert OF_P in text
    decode, prefill = (
        parse_config({**each.transfer_config["kv_connector_extra_config"], **json.loads("{" + more + "}")})
        for each, more in ((D, OF_D), (P, OF_P))
    )
    assert (decode.serve_prefixes, decode.port) == (True, 8999)
    assert decode.port != prefill.port, "with the pool they may share a node's network namespace"
    assert prefill.peers == ["readers"]
    assert prefill.allowed_peers is None, "it would have to name D"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, without a cluster")
@pytest.mark.parametrize("components", ["prefixes", "pool, prefixes"])
def test_kubectl_builds_what_follows_the_schema(tmp_path: Path, components: str) -> None:
    found: list[Any] = list(yaml.safe_load_all(build_with(components, tmp_path)))
    for manifest in found:
        kubernetes_validate.validate(manifest, "1.25", strict=True)
    assert "pd-decode-prefixes" in [one["metadata"]["name"] for one in found if one["kind"] == "NetworkPolicy"]
    (decode,) = [one for one in found if one["kind"] == "Deployment" and one["metadata"]["name"] == "pd-decode"]
    assert Workload(decode).ports == {**D.ports, "control": 8999}
