"""What routers write into ``kv_transfer_params``, as they write it, read by the connector's parsers.

Each text is what a router's source or the router itself produces: the keys, their order, the nulls, and numbers as the
router's JSON library writes them. docs/routers.md names the routers' versions.

Covers: pd_connector.params.
"""

import json
import re
from typing import Any

import pytest

from pd_connector.params import (
    ParamsError,
    PromptIdentity,
    RemotePrefill,
    RemoteTransfer,
    check_prompt,
    contents_digest,
    is_decode_leg,
    is_prefill_leg,
    parse_decode_leg,
    prefill_transfer_id,
    prompt_digest,
    unusable_keys,
)
from pd_connector.scheduler.prefill.bootstrap import control_label
from tests.support.connector.requests import a_prompt, a_remote

PROMPT = a_prompt(70)
ANSWER = a_remote(PROMPT)

# P's leg

IN_TURN = {
    "vllm-router 0.1.17 nixl": """{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,
        "remote_block_ids":null,"remote_host":null,"remote_port":null}""",
    "llm-d sidecar nixlv2": """{"do_remote_decode":true,"do_remote_prefill":false,"remote_block_ids":null,
        "remote_engine_id":null,"remote_host":null,"remote_port":null}""",
    "production-stack": """{"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
        "remote_block_ids": null, "remote_host": null, "remote_port": null}""",
    "AIBrix shfs": """{"remote_host":null,"remote_port":null,"do_remote_decode":true,"do_remote_prefill":false,
        "remote_engine_id":null,"remote_block_ids":null}""",
    "Dynamo NixlConnector": """{"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
        "remote_block_ids": null, "remote_host": null, "remote_port": null}""",
    "smg NixlConnector": '{"do_remote_decode":true,"do_remote_prefill":false}',
}
AT_ONCE = {
    "vllm-router 0.1.17 mooncake": """{"do_remote_decode":true,"do_remote_prefill":false,
        "transfer_id":"xfer-ac99cb10-2e32-4756-a910-5e5e805e3c7d"}""",
    "llm-d sidecar mooncake": """{"do_remote_decode":true,"do_remote_prefill":false,
        "transfer_id":"xfer-ac99cb10-2e32-4756-a910-5e5e805e3c7d"}""",
}


@pytest.mark.parametrize("router", IN_TURN)
def test_a_prefill_leg_in_turn_has_no_name(router: str) -> None:
    params = json.loads(IN_TURN[router])
    assert is_prefill_leg(params)
    assert not is_decode_leg(params)
    assert prefill_transfer_id(params) == ""


@pytest.mark.parametrize("router", AT_ONCE)
def test_a_prefill_leg_at_once_has_the_routers_name(router: str) -> None:
    params = json.loads(AT_ONCE[router])
    assert is_prefill_leg(params)
    assert not is_decode_leg(params)
    assert prefill_transfer_id(params) == "xfer-ac99cb10-2e32-4756-a910-5e5e805e3c7d"


# D's leg, with what P has answered


def as_it_is(answer: str) -> str:
    """vllm-router, smg (serde_json's raw value) and Dynamo: the same JSON."""
    return answer


def through_go(answer: str) -> str:
    """llm-d's sidecar: Go decodes numbers to float64, and writes keys in order and whole numbers without a fraction."""

    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: whole(one) for name, one in sorted(value.items())}
        if isinstance(value, list):
            return [whole(one) for one in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return json.dumps(whole(json.loads(answer)), separators=(",", ":"))


def with_its_own_host(answer: str) -> str:
    """production-stack and AIBrix: P's address as the router knows it, which is the right one if both are a pod's."""
    return json.dumps(json.loads(answer) | {"remote_host": ANSWER.remote_host})


def through_go_with_its_own_host(answer: str) -> str:
    return through_go(with_its_own_host(answer))


@pytest.mark.parametrize("relay", [as_it_is, through_go, with_its_own_host, through_go_with_its_own_host])
def test_what_p_has_answered_is_read_whatever_json_library_has_relayed_it(relay: Any) -> None:
    params = json.loads(relay(json.dumps(ANSWER.to_params())))
    assert is_decode_leg(params)
    remote = parse_decode_leg(params)
    assert isinstance(remote, RemotePrefill)
    assert remote == ANSWER
    check_prompt(remote, PromptIdentity(len(PROMPT), prompt_digest(PROMPT, ())))
    assert contents_digest(remote) == contents_digest(ANSWER)


@pytest.mark.parametrize("name", ["prefill-0.prefill.default.svc", "p-service", "10.0.0.9"])
def test_a_host_of_the_routers_own_is_where_d_connects_to(name: str) -> None:
    """The host of P's URL: a service name is resolved by D, and works if it stands for this P alone."""
    params = ANSWER.to_params() | {"remote_host": name}
    remote = parse_decode_leg(params)
    assert remote.remote_host == name
    assert isinstance(remote, RemotePrefill)
    assert contents_digest(remote) == contents_digest(ANSWER)


@pytest.mark.parametrize("params", ["null", "{}"])
def test_a_router_that_found_nothing_to_relay_has_d_compute(params: str) -> None:
    """llm-d sends null where P handed nothing over, production-stack nothing at all."""
    assert not is_decode_leg(json.loads(params))
    assert unusable_keys(json.loads(params)) == ()


# D's leg, at once


def follows(engine_id: str, bootstrap: str = "http://127.0.0.1:18998") -> str:
    """What vllm-router and llm-d's sidecar write, with what P's /query told them."""
    return (
        '{"do_remote_decode":false,"do_remote_prefill":true,"transfer_id":"xfer-ac99cb10-2e32-4756-a910-5e5e805e3c7d",'
        f'"remote_bootstrap_addr":"{bootstrap}","remote_engine_id":"{engine_id}"}}'
    )


@pytest.mark.parametrize(
    ("host", "told"), [("10.0.0.1", "10.0.0.1"), ("p.example", "p.example"), ("fd00::3", "[fd00::3]")]
)
def test_what_p_tells_routers_leads_d_to_its_control_channel(host: str, told: str) -> None:
    params = json.loads(follows(control_label(host, 8998)))
    assert is_decode_leg(params)
    remote = parse_decode_leg(params)
    assert isinstance(remote, RemoteTransfer)
    assert (remote.remote_host, remote.remote_port, remote.remote_engine_id) == (told, 8998, "")
    assert remote.transfer_id == "xfer-ac99cb10-2e32-4756-a910-5e5e805e3c7d"


def test_smg_and_dynamo_pass_vllms_own_engine_id_on_which_may_be_set_to_the_address() -> None:
    """By MooncakeConnector's contract, with ``"engine_id": "@10.0.0.1:8998"`` in P's --kv-transfer-config."""
    smg = """{"do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":"http://10.0.0.1:8998",
        "remote_engine_id":"@10.0.0.1:8998","transfer_id":"7a0b9a4e-1"}"""
    remote = parse_decode_leg(json.loads(smg))
    assert isinstance(remote, RemoteTransfer)
    assert (remote.remote_host, remote.remote_port, remote.transfer_id) == ("10.0.0.1", 8998, "7a0b9a4e-1")


# What cannot be used


@pytest.mark.parametrize("engine_id", ["5f1d0f3a", "5f1d0f3a_dp1", "@10.0.0.1:8998_dp1", "@10.0.0.1"])
def test_an_engine_id_without_an_address_is_an_error_that_says_what_is_missing(engine_id: str) -> None:
    with pytest.raises(ParamsError, match=re.escape("missing remote_host and remote_port")):
        parse_decode_leg(json.loads(follows(engine_id)))


@pytest.mark.parametrize(
    "params",
    [
        '{"remote_prefiller":{"kv_request_id":"1","remote_host":"10.0.0.1","remote_port":7777}}',
        '{"remote_kv_source":{"kv_request_id":"1","remote_host":"10.0.0.1","remote_port":7777}}',
    ],
    ids=["remote_prefiller", "remote_kv_source"],
)
def test_llm_ds_offloading_contract_is_named_as_one_not_spoken(params: str) -> None:
    assert not is_decode_leg(json.loads(params))
    assert unusable_keys(json.loads(params)) == (next(iter(json.loads(params))),)


def test_the_layerwise_proxys_contract_is_refused_by_name_and_the_way_out_is_another_router() -> None:
    """What vllm-ascend's load_balance_proxy_layerwise_server_example.py sends to D first."""
    params = json.loads(
        """{"do_remote_decode": false, "do_remote_prefill": true,
        "metaserver": "http://10.0.0.7:8000/v1/metaserver"}"""
    )
    assert is_decode_leg(params)
    with pytest.raises(
        ParamsError,
        match=r"a metaserver \('http://10.0.0.7:8000/v1/metaserver'\).* MooncakeLayerwiseConnector.* pd-proxy",
    ):
        parse_decode_leg(params)


def test_a_metaserver_beside_what_p_has_answered_is_a_routers_own_key() -> None:
    assert parse_decode_leg(ANSWER.to_params() | {"metaserver": "http://10.0.0.7:8000"}) == ANSWER
