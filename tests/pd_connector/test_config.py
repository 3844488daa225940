"""The settings: every key has a default, and whatever cannot be meant is refused with the way out.

Covers: pd_connector.old_settings, pd_connector.recipe_keys.
"""

import math
import re
from typing import Any

import pytest

from pd_connector.config import ConfigError, ConnectorConfig, Tuning, parse_config, recipe_keys
from pd_connector.old_settings import OLD_SETTINGS

TUNING_DEFAULTS = {
    "staging_bytes": 128 * 1024 * 1024,
    "descriptors_per_call": None,
    "max_descriptors_in_flight": None,
    "longest_poll_us": None,
    "descriptor_cost_us": None,
    "byte_cost_ns": None,
}

DEFAULTS = {
    "host": None,
    "port": 0,
    "bootstrap_port": 0,
    "protocol": "auto",
    "devices": "",
    "cross_layer_blocks": True,
    "lease_ttl_s": 30.0,
    "claim_timeout_s": 120.0,
    "queue_timeout_s": 120.0,
    "pull_timeout_s": 60.0,
    "tuning": TUNING_DEFAULTS,
    "cpu_bytes_to_use": 0,
    "cpu_store": "eager",
    "host_transfers": "off",
    "serve_prefixes": False,
    "peers": None,
    "pool": None,
    "drain_timeout_s": 5.0,
    "model_check": "weights",
    "canary": None,
    "verify": False,
    "secret_file": None,
    "allowed_peers": None,
}

ACCEPTED: list[tuple[str, Any]] = [
    ("host", "10.0.0.5"),
    ("host", None),
    ("port", 65535),
    ("bootstrap_port", 8998),
    ("protocol", "tcp"),
    ("protocol", "rdma"),
    ("protocol", "ascend"),
    ("devices", "mlx5_0,mlx5_1"),
    ("cross_layer_blocks", False),
    ("lease_ttl_s", 0.5),
    ("claim_timeout_s", 300),
    ("queue_timeout_s", 0.5),
    ("pull_timeout_s", 120),
    ("cpu_bytes_to_use", 32 * 1024**3),
    ("cpu_store", "lazy"),
    ("host_transfers", "off"),
    ("tuning", {}),
    ("serve_prefixes", True),
    ("pool", None),
    ("peers", []),
    ("peers", ["10.0.0.5:8998", "[fd00::1]:8998", "decode.internal:1", "readers"]),
    ("drain_timeout_s", 0),
    ("model_check", "config"),
    ("model_check", "off"),
    ("canary", "warn"),
    ("canary", "off"),
    ("verify", True),
    ("secret_file", "/run/secrets/pd"),
    ("allowed_peers", ["10.0.0.5", "10.1.0.0/16", "fd00::/8", "prefill.internal"]),
]

ACCEPTED_TUNING: list[tuple[str, Any]] = [
    ("descriptors_per_call", 1),
    ("descriptors_per_call", 65536),
    ("max_descriptors_in_flight", 65536),
    ("staging_bytes", 0),
    ("longest_poll_us", 50),
    ("descriptor_cost_us", 3.5),
    ("byte_cost_ns", 0),
]

REFUSED: list[tuple[str, Any]] = [
    ("claim_timeout_s", 0),
    ("queue_timeout_s", math.inf),
    ("bootstrap_port", 65536),
    ("bootstrap_port", "8998"),
    ("host", ""),
    ("host", "10.0.0.5:8998"),
    ("host", "http://10.0.0.5"),
    ("host", "10.0.0.5 "),
    ("host", 7),
    ("port", -1),
    ("port", 65536),
    ("port", "8998"),
    ("port", 8998.0),
    ("protocol", "roce"),
    ("protocol", None),
    ("devices", ["mlx5_0"]),
    ("devices", "mlx5_0,"),
    ("cross_layer_blocks", "true"),
    ("cross_layer_blocks", 1),
    ("lease_ttl_s", 0),
    ("lease_ttl_s", -1.0),
    ("lease_ttl_s", math.nan),
    ("lease_ttl_s", "30"),
    ("lease_ttl_s", True),
    ("pull_timeout_s", 0.0),
    ("pull_timeout_s", math.inf),
    ("cpu_bytes_to_use", -1),
    ("cpu_bytes_to_use", "32 GiB"),
    ("cpu_bytes_to_use", 1.5e9),
    ("cpu_bytes_to_use", math.nan),
    ("cpu_bytes_to_use", True),
    ("cpu_store", "always"),
    ("host_transfers", True),
    ("host_transfers", "host"),
    ("tuning", 7),
    ("tuning", None),
    ("serve_prefixes", 1),
    ("peers", "10.0.0.5:8998"),
    ("pool", "50052"),
    ("pool", "127.0.0.1:0"),
    ("peers", ["10.0.0.5"]),
    ("peers", ["10.0.0.5:0"]),
    ("peers", ["Readers"]),
    ("peers", ["fd00::1:8998"]),
    ("peers", ["http://decode:8998"]),
    ("peers", ["decode:8998"] * 17),
    ("drain_timeout_s", -0.5),
    ("model_check", False),
    ("model_check", "none"),
    ("canary", True),
    ("canary", "on"),
    ("verify", "true"),
    ("verify", 1),
    ("secret_file", ""),
    ("secret_file", 7),
    ("allowed_peers", []),
    ("allowed_peers", "10.0.0.5"),
    ("allowed_peers", ["10.0.0.5", "10.1.0.0/33"]),
    ("allowed_peers", ["10.1.0.1/16"]),
    ("allowed_peers", ["http://prefill"]),
]

REFUSED_TUNING: list[tuple[str, Any]] = [
    ("staging_bytes", -1),
    ("staging_bytes", 1 << 41),
    ("longest_poll_us", 0.5),
    ("longest_poll_us", 200_000),
    ("descriptor_cost_us", -0.1),
    ("byte_cost_ns", math.inf),
    ("descriptors_per_call", 0),
    ("descriptors_per_call", 65537),
    ("descriptors_per_call", 2.5),
    ("max_descriptors_in_flight", 65537),
]


def test_without_settings_every_key_has_its_default() -> None:
    assert parse_config({}).model_dump() == DEFAULTS


def test_an_ipv6_host_may_have_brackets() -> None:
    assert parse_config({"host": "[fd00::5]"}).host == parse_config({"host": "fd00::5"}).host == "fd00::5"


#: Of recipes for vllm-ascend's own connectors.
RECIPE = {
    "use_ascend_direct": True,
    "ascend_local_comm_res_path": "/etc/hixlep",
    "prefill": {"dp_size": 1, "pp_size": 2, "tp_size": 16, "pp_layer_partition": "41,37"},
    "decode": {"dp_size": 16, "tp_size": 2},
    "qos_priority": 1,
}


def test_a_recipes_keys_are_understood_beside_the_settings_and_are_none() -> None:
    assert parse_config(RECIPE | {"verify": True}).model_dump() == DEFAULTS | {"verify": True}
    keys = recipe_keys(RECIPE)
    assert keys.prefill.tp_size == 16
    assert keys.decode.pp_size is None
    assert keys.model_dump(exclude_unset=True) == RECIPE


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("prefill", {"tp_size": 0}, r"prefill.tp_size = 0: .* greater than or equal to 1"),
        ("decode", {"tp": 4}, r"decode.tp = 4: extra inputs are not permitted"),
        ("decode", 4, r"decode = 4: .* dictionary"),
        ("use_ascend_direct", "maybe", r"use_ascend_direct = 'maybe': .* boolean"),
        ("qos_priority", 5, "qos_priority = 5: .* less than or equal to 4"),
        ("qos_priority", True, "qos_priority = True: .* integer"),
    ],
)
def test_a_recipes_key_with_a_wrong_value_is_refused(key: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_connector_extra_config: {says}"):
        parse_config({key: value})


def test_every_key_has_a_valid_and_a_wrong_value_here() -> None:
    assert {key for key, _ in ACCEPTED} == {key for key, _ in REFUSED} == set(ConnectorConfig.model_fields)
    assert {key for key, _ in ACCEPTED_TUNING} == {key for key, _ in REFUSED_TUNING} == set(Tuning.model_fields)


@pytest.mark.parametrize(("key", "value"), ACCEPTED_TUNING)
def test_a_valid_number_of_tuning_is_taken(key: str, value: Any) -> None:
    tuned = {"tuning": TUNING_DEFAULTS | {key: value}}
    assert parse_config({"tuning": {key: value}}).model_dump() == DEFAULTS | tuned


@pytest.mark.parametrize(("key", "value"), ACCEPTED)
def test_a_valid_value_is_taken(key: str, value: Any) -> None:
    assert parse_config({key: value}).model_dump() == DEFAULTS | ({key: value} if key != "tuning" else {})


@pytest.mark.parametrize("value", ["auto", "always"])
def test_transfers_in_host_memory_are_refused_without_it(value: str) -> None:
    settings = {"host_transfers": value}
    with pytest.raises(
        ConfigError, match=f"host_transfers = '{value}': cpu_bytes_to_use is 0.*or host_transfers to 'off'"
    ):
        parse_config(settings)
    with_memory = settings | {"cpu_bytes_to_use": 1 << 30}
    assert parse_config(with_memory).model_dump() == DEFAULTS | with_memory


def test_a_pool_is_refused_without_host_memory() -> None:
    settings = {"pool": "[::1]:50052"}
    with pytest.raises(ConfigError, match=r"pool = '\[::1\]:50052': cpu_bytes_to_use is 0.*or leave pool out"):
        parse_config(settings)
    with_memory = settings | {"cpu_bytes_to_use": 1 << 30}
    assert parse_config(with_memory).model_dump() == DEFAULTS | with_memory


@pytest.mark.parametrize(("key", "value"), REFUSED)
def test_a_wrong_value_is_refused_naming_key_and_value(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_config({key: value})
    assert f"kv_connector_extra_config: {key} = {value!r}: " in str(refusal.value)


@pytest.mark.parametrize(("key", "value"), REFUSED_TUNING)
def test_a_wrong_number_of_tuning_is_refused_by_its_dotted_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_config({"tuning": {key: value}})
    assert f"kv_connector_extra_config: tuning.{key} = {value!r}: " in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("lease_ttl_s", 0, "greater than or equal to 0.1"),
        ("lease_ttl_s", 601, "less than or equal to 600"),
        ("claim_timeout_s", 601, "less than or equal to 600"),
        ("port", 65536, "less than or equal to 65535"),
        ("tuning", {"max_descriptors_in_flight": 65537}, "less than or equal to 65536"),
        ("tuning", {"byte_cost_ns": -1}, r"tuning.byte_cost_ns = -1: .* \(Cost of a byte, in nanoseconds, by"),
        ("protocol", "roce", "'auto', 'tcp', 'rdma' or 'ascend'"),
        ("cpu_bytes_to_use", "8GiB", r"valid integer \(Host memory for KV blocks, in bytes, of all workers"),
    ],
)
def test_the_refusal_of_a_value_names_the_rule(key: str, value: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        parse_config({key: value})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("lease_ttl", "lease_ttl_s"), ("cross_layer_block", "cross_layer_blocks"), ("Port", "port"), ("hots", "host")],
)
def test_an_unknown_key_is_refused_with_the_nearest_valid_one(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{key}', did you mean '{nearest}'"):
        parse_config({key: 1})


@pytest.mark.parametrize("rule", ["10.0.0.0/8", "fd00::1"])
def test_a_peer_that_cannot_be_contacted_is_refused(rule: str) -> None:
    with pytest.raises(ConfigError, match=rf"peers: '192.168.0.2:17001' is none of allowed_peers, \['{rule}'\]"):
        parse_config({"peers": ["readers", "192.168.0.2:17001"], "allowed_peers": [rule]})


@pytest.mark.parametrize("rules", [["192.168.0.0/24"], ["10.0.0.1", "prefill"], None])
def test_a_peer_that_may_have_an_allowed_address_is_taken(rules: list[str] | None) -> None:
    parse_config({"peers": ["192.168.0.2:17001", "name:17001"], "allowed_peers": rules})


def test_an_unknown_number_of_tuning_is_refused_with_the_nearest_valid_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'tuning.byte_cost', did you mean 'tuning.byte_cost_ns'"):
        parse_config({"tuning": {"byte_cost": 1}})


@pytest.mark.parametrize("key", OLD_SETTINGS)
def test_an_old_key_is_refused_with_what_took_its_place_or_why_nothing_did(key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_config({key: 1})
    said = str(refusal.value)
    assert f"kv_connector_extra_config: {key} is no setting any more: " in said
    taken = re.search(r"(\w+) took its place: ", said)
    assert taken is not None
    assert taken[1] == "nothing" or taken[1] in ConnectorConfig.model_fields
    assert key not in ConnectorConfig.model_fields


def test_a_key_of_vllm_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"kv_role is no setting .* beside kv_connector_extra_config$"):
        parse_config({"kv_role": "kv_both"})


def test_what_is_wrong_is_said_once() -> None:
    with pytest.raises(ConfigError, match=r"^kv_connector_extra_config: host = 'http://p': host 'http://p' is "):
        parse_config({"host": "http://p"})


def test_an_unknown_key_like_no_other_is_refused_with_all_valid_ones() -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_config({"xyzzy": 1})
    assert "unknown key 'xyzzy'" in str(refusal.value)
    assert ", ".join(DEFAULTS) in str(refusal.value)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_config({"lease_ttl_s": -1, "leese_ttl_s": 3, "port": "x"})
    assert all(name in str(refusal.value) for name in ("lease_ttl_s = -1", "'leese_ttl_s'", "port = 'x'"))


def test_settings_cannot_be_changed_later() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_config({}).port = 1


def test_every_key_is_documented() -> None:
    for model in (ConnectorConfig, Tuning):
        assert all(field.description for field in model.model_fields.values())


def test_blanks_between_devices_are_no_part_of_their_names() -> None:
    """Mooncake passes over what it does not find: one card would carry what two should."""
    assert parse_config({"devices": "mlx5_0, mlx5_1"}).devices == "mlx5_0,mlx5_1"
