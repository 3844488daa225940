"""``kv_transfer_params``: what a prefill engine answers, a router relays, and a decode engine believes."""

import json
import re
from typing import Any

import msgspec
import pytest

from pd_connector.params import (
    ParamsError,
    PromptIdentity,
    RemotePrefill,
    RemoteTransfer,
    check_prompt,
    contents_digest,
    is_decode_leg,
    is_malformed,
    is_prefill_leg,
    parse_decode_leg,
    parse_remote_prefill,
    prompt_digest,
    unusable_keys,
)
from pd_connector.vllm.cache_specs import RING_TOKENS
from tests.support.connector.requests import a_prompt, a_remote

PROMPT = a_prompt(70)
DIGEST = prompt_digest(PROMPT, ())
REMOTE = a_remote(PROMPT)


def parse(params: dict[str, Any]) -> RemotePrefill:
    remote = parse_remote_prefill(params)
    check_prompt(remote, PromptIdentity(len(PROMPT), DIGEST))
    return remote


def test_params_survive_the_way_through_a_router() -> None:
    assert parse(json.loads(json.dumps(REMOTE.to_params()))) == REMOTE


def test_each_layer_may_have_a_cache_group_of_its_own() -> None:
    groups, layers = 81, tuple((f"layer{each}",) for each in range(81))
    many = msgspec.structs.replace(
        REMOTE, remote_block_ids=((1,),) * groups, remote_block_sizes=(16,) * groups, remote_layers=layers
    )
    assert parse(json.loads(json.dumps(many.to_params()))) == many


def test_the_answer_turns_a_prefill_leg_into_a_decode_leg() -> None:
    assert is_decode_leg(REMOTE.to_params())
    assert not is_prefill_leg(REMOTE.to_params())


def test_the_answer_has_the_keys_that_existing_routers_relay() -> None:
    assert REMOTE.to_params().keys() >= {
        "do_remote_prefill",
        "do_remote_decode",
        "remote_engine_id",
        "remote_request_id",
        "remote_block_ids",
        "remote_host",
        "remote_port",
        "remote_block_sizes",
        "tp_size",
    }


def test_params_can_name_the_block_size_of_a_ring() -> None:
    sizes = (RING_TOKENS,) * len(REMOTE.remote_block_ids)
    remote = msgspec.structs.replace(REMOTE, remote_block_sizes=sizes)
    assert parse_remote_prefill(remote.to_params()).remote_block_sizes == sizes


@pytest.mark.parametrize("params", [[], [1], "do_remote_prefill", 0, 1.5, True, ["do_remote_prefill"]])
def test_what_is_no_json_object_is_malformed_and_neither_leg(params: Any) -> None:
    assert is_malformed(params)
    assert not is_prefill_leg(params)
    assert not is_decode_leg(params)
    with pytest.raises(ParamsError, match="Expected `object`, got"):
        parse_remote_prefill(params)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": True}])
def test_nothing_and_objects_are_not_malformed(params: Any) -> None:
    assert not is_malformed(params)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False, "do_remote_decode": False}])
def test_a_request_without_flags_is_neither_leg(params: dict[str, Any] | None) -> None:
    assert not is_prefill_leg(params)
    assert not is_decode_leg(params)


def test_a_routers_own_keys_are_ignored() -> None:
    assert parse({**REMOTE.to_params(), "router_session": {"id": 7}, "transfer_id": "t"}) == REMOTE


REQUIRED = [field for field in msgspec.structs.fields(RemotePrefill) if field.required]


@pytest.mark.parametrize("field", REQUIRED, ids=lambda field: field.name)
def test_a_missing_field_is_refused_by_name(field: msgspec.structs.FieldInfo) -> None:
    params = REMOTE.to_params()
    del params[field.name]
    with pytest.raises(ParamsError, match=f"`{field.name}`.*on unchanged"):
        parse(params)


WRONG = [
    ("remote_engine_id", ""),
    ("remote_engine_id", None),
    ("remote_engine_id", "x" * 513),
    ("remote_request_id", 5),
    ("remote_host", ""),
    ("remote_host", ["10.0.0.5"]),
    ("remote_port", 0),
    ("remote_port", 65536),
    ("remote_port", "8998"),
    ("remote_port", True),
    ("remote_block_ids", [1, 2, 3]),
    ("remote_block_ids", [[1, -2]]),
    ("remote_block_ids", [[1, 2**31]]),
    ("remote_block_ids", [[1, "2"]]),
    ("remote_block_ids", None),
    ("remote_num_tokens", 0),
    ("remote_num_tokens", 70.5),
    ("remote_block_sizes", [0]),
    ("remote_block_sizes", "32"),
    ("remote_block_sizes", [16, 16]),
    ("remote_layers", ["a"]),
    ("remote_layers", [["a"], ["b"]]),
    ("remote_layers", [["a layer"]]),
    ("remote_layers", [["x" * 257]]),
    ("tp_size", "1"),
    ("prompt_is_cut", "no"),
    ("lease_id", ""),
    ("lease_id", 9),
    ("lease_ttl_s", 0),
    ("lease_ttl_s", -3.0),
    ("lease_ttl_s", float("nan")),
    ("lease_ttl_s", "30"),
    ("prompt_digest", None),
    ("adapter_digest", "french"),
    ("media_digest", "no colon"),
    ("remote_attempt", -1),
    ("remote_attempt", 2**70),
    ("remote_num_tokens", 2**70),
]


def test_tables_of_several_cache_groups_say_which_layers_they_are_of() -> None:
    tables: dict[str, Any] = {**REMOTE.to_params(), "remote_block_ids": [[1, 2], [3, 4]]}
    assert parse({**tables, "remote_layers": [["a", "c"], ["b"]]}).remote_layers == (("a", "c"), ("b",))
    with pytest.raises(ParamsError, match=r"2 block tables, .* older than this one. Use the same version on both"):
        parse(tables)


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_wrong_field_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ParamsError, match=f"{field}"):
        parse({**REMOTE.to_params(), field: value})


def test_every_field_has_a_wrong_value_here() -> None:
    assert {field for field, _ in WRONG} == {field.name for field in msgspec.structs.fields(RemotePrefill)}


def test_another_number_of_tokens_is_refused_with_both_numbers() -> None:
    with pytest.raises(ParamsError, match=r"computed 70 prompt tokens and this request has 71: .*time zone"):
        check_prompt(REMOTE, PromptIdentity(71, prompt_digest(a_prompt(71), ())))


def test_another_prompt_of_the_same_length_is_refused_with_both_digests() -> None:
    other = prompt_digest(a_prompt(70, seed=1), ())
    with pytest.raises(ParamsError, match=f"digest {DIGEST}.*{other}.*time zone"):
        check_prompt(REMOTE, PromptIdentity(70, other))


def test_a_prompt_without_token_ids_is_compared_by_length_only() -> None:
    check_prompt(REMOTE, PromptIdentity(70, ""))
    embeds = msgspec.structs.replace(REMOTE, prompt_digest="")
    check_prompt(embeds, PromptIdentity(70, DIGEST))


def test_the_digest_tells_apart_what_shapes_the_cache() -> None:
    digests = [
        prompt_digest([1, 2, 3], ()),
        prompt_digest([1, 2, 4], ()),
        prompt_digest([1, 2], ()),
        prompt_digest([12, 3], ()),
        prompt_digest([1, 2, 3], ("lora:a",)),
        prompt_digest([1, 2, 3], ("lora:b",)),
        prompt_digest([1, 2, 3], ("lora:a", "mm:cat")),
    ]
    assert len(set(digests)) == len(digests)
    assert prompt_digest([1, 2, 3], ()) == digests[0]
    assert all(len(digest) == 16 for digest in digests)
    assert prompt_digest(None, ()) == ""


def test_the_digest_of_what_a_lease_holds_survives_the_way_through_a_router() -> None:
    relayed = parse_remote_prefill(json.loads(json.dumps(REMOTE.to_params())))
    assert contents_digest(relayed) == contents_digest(REMOTE)
    assert re.fullmatch("[0-9a-f]{32}", contents_digest(REMOTE))


@pytest.mark.parametrize(
    "change",
    [
        {"remote_block_ids": ((1, 2, 3, 4, 6),)},
        {"remote_block_ids": ((2, 1, 3, 4, 5),)},
        {"remote_block_ids": ((1, 2, 3), (4, 5))},
        {"remote_block_ids": ((1, 2, 3, 4, 5), ())},
        {"remote_num_tokens": 71},
        {"prompt_digest": ""},
        {"adapter_digest": "00ff"},
        {"media_digest": "00:ff"},
    ],
    ids=str,
)
def test_whoever_alters_what_is_to_be_read_changes_the_digest(change: dict[str, Any]) -> None:
    assert contents_digest(msgspec.structs.replace(REMOTE, **change)) != contents_digest(REMOTE)


# Transfers by name

NAMED = {
    "do_remote_prefill": True,
    "transfer_id": "xfer-1",
    "remote_host": "10.0.0.5",
    "remote_port": 8998,
    "remote_engine_id": "engine-p",
}
TRANSFER = RemoteTransfer("xfer-1", "10.0.0.5", 8998, "engine-p")


def without(params: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key not in keys}


def test_a_decode_leg_may_name_its_transfer() -> None:
    assert parse_decode_leg(NAMED) == TRANSFER
    assert TRANSFER.label == "transfer xfer-1 at 10.0.0.5:8998"


def test_a_decode_leg_without_a_name_is_what_a_prefill_engine_answers() -> None:
    assert parse_decode_leg(REMOTE.to_params()) == REMOTE
    assert parse_decode_leg({**REMOTE.to_params(), "transfer_id": None}) == REMOTE
    with pytest.raises(ParamsError, match=r"`remote_engine_id`.*on unchanged"):
        parse_decode_leg({"do_remote_prefill": True})
    with pytest.raises(ParamsError, match="Expected `object`, got"):
        parse_decode_leg(["transfer_id"])


@pytest.mark.parametrize("engine_id", [{}, {"remote_engine_id": None}, {"remote_engine_id": ""}])
def test_the_engine_of_a_transfer_need_not_be_known(engine_id: dict[str, Any]) -> None:
    assert parse_decode_leg({**without(NAMED, "remote_engine_id"), **engine_id}) == RemoteTransfer(
        "xfer-1", "10.0.0.5", 8998, ""
    )


def test_nulls_and_a_routers_own_keys_do_not_matter_to_a_named_leg() -> None:
    others = {"lease_id": None, "remote_block_ids": None, "do_remote_decode": None, "router_session": {"id": 7}}
    assert parse_decode_leg({**NAMED, **others}) == TRANSFER
    assert parse_decode_leg({**NAMED, "lease_id": "", "remote_block_ids": []}) == TRANSFER


@pytest.mark.parametrize(
    ("mixed", "named"),
    [
        ({"lease_id": "L"}, "transfer_id and lease_id"),
        ({"remote_block_ids": [[1, 2]]}, "transfer_id and remote_block_ids"),
        (REMOTE.to_params(), "transfer_id and lease_id and remote_block_ids"),
    ],
)
def test_params_of_both_contracts_are_refused(mixed: dict[str, Any], named: str) -> None:
    with pytest.raises(ParamsError, match=f"have a {named}: .* Send the one or pass on the other"):
        parse_decode_leg({**mixed, **NAMED})


@pytest.mark.parametrize(
    ("keys", "missing"),
    [
        (["remote_host"], "missing remote_host. Send them"),
        (["remote_port"], "missing remote_port. Send them"),
        (["remote_host", "remote_port"], "missing remote_host and remote_port. Send them"),
    ],
)
@pytest.mark.parametrize("value", ["absent", None])
def test_a_transfer_without_an_address_is_refused_by_what_is_missing(
    keys: list[str], missing: str, value: str | None
) -> None:
    params = without(NAMED, *keys) if value == "absent" else {**NAMED, **dict.fromkeys(keys)}
    with pytest.raises(ParamsError, match=f"{missing}, or a remote_engine_id of the form id@host:port"):
        parse_decode_leg(params)


@pytest.mark.parametrize(
    ("engine_id", "transfer"),
    [
        ("c0ffee@10.0.0.7:7000", RemoteTransfer("xfer-1", "10.0.0.7", 7000, "c0ffee")),
        ("c0ffee@p-0.prefill.local:7000", RemoteTransfer("xfer-1", "p-0.prefill.local", 7000, "c0ffee")),
        ("c0ffee@[fd00::7]:7000", RemoteTransfer("xfer-1", "[fd00::7]", 7000, "c0ffee")),
        ("@10.0.0.7:7000", RemoteTransfer("xfer-1", "10.0.0.7", 7000, "")),
    ],
)
def test_an_engine_id_may_carry_the_address(engine_id: str, transfer: RemoteTransfer) -> None:
    params = {"do_remote_prefill": True, "transfer_id": "xfer-1", "remote_bootstrap_addr": "http://10.0.0.7:9000"}
    assert parse_decode_leg({**params, "remote_engine_id": engine_id}) == transfer
    nulls = {"remote_host": None, "remote_port": None}
    assert parse_decode_leg({**params, **nulls, "remote_engine_id": engine_id}) == transfer


def test_an_address_of_its_own_goes_before_that_of_the_engine_id() -> None:
    assert parse_decode_leg({**NAMED, "remote_engine_id": "engine-p@10.9.9.9:1"}) == TRANSFER


@pytest.mark.parametrize("engine_id", ["c0ffee", "c0ffee@", "c0ffee@host", "c0ffee@fd00::7:7000", "c0ffee@host:port"])
def test_an_engine_id_without_an_address_does_not_stand_in_for_one(engine_id: str) -> None:
    params = {"do_remote_prefill": True, "transfer_id": "xfer-1", "remote_engine_id": engine_id}
    with pytest.raises(ParamsError, match="missing remote_host and remote_port"):
        parse_decode_leg(params)


WRONG_OF_NAMED = [
    ("transfer_id", ""),
    ("transfer_id", "x" * 129),
    ("transfer_id", "two words"),
    ("transfer_id", 5),
    ("remote_host", ""),
    ("remote_host", "a host"),
    ("remote_port", 0),
    ("remote_port", 65536),
    ("remote_port", "8998"),
    ("remote_port", True),
    ("remote_engine_id", 7),
    ("remote_engine_id", "two words"),
    ("remote_engine_id", "x" * 129),
]


@pytest.mark.parametrize(("field", "value"), WRONG_OF_NAMED)
def test_a_wrong_field_of_a_transfer_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ParamsError, match=f"{field}.*Needed are transfer_id"):
        parse_decode_leg({**NAMED, field: value})


@pytest.mark.parametrize("engine_id", ["c0ffee@host:0", "c0ffee@host:65536"])
def test_a_wrong_port_in_an_engine_id_is_refused(engine_id: str) -> None:
    params = {"do_remote_prefill": True, "transfer_id": "xfer-1", "remote_engine_id": engine_id}
    with pytest.raises(ParamsError, match="remote_port"):
        parse_decode_leg(params)


def test_every_field_of_a_transfer_has_a_wrong_value_here() -> None:
    assert {field for field, _ in WRONG_OF_NAMED} == {field.name for field in msgspec.structs.fields(RemoteTransfer)}


@pytest.mark.parametrize(
    ("params", "keys"),
    [
        (None, ()),
        ({}, ()),
        ("transfer_id", ()),
        (NAMED, ()),
        ({"do_remote_decode": True, "x": 1}, ()),
        ({"do_remote_prefill": False, "x": 1}, ()),
        ({"x": None, "do_remote_prefill": None}, ()),
        ({"prefill_instance": "p0", "y": None, "do_remote_prefill": None}, ("prefill_instance",)),
    ],
)
def test_params_of_an_unknown_contract_are_known_by_their_keys(params: Any, keys: tuple[str, ...]) -> None:
    assert unusable_keys(params) == keys


@pytest.mark.parametrize(
    "changes",
    [
        {"remote_block_ids": ((1, 2, 3, 4, 6),)},
        {"remote_num_tokens": 69},
        {"prompt_digest": "another"},
        {"remote_attempt": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_was_leased_is_told_from_what_it_may_be_taken_for(changes: dict[str, Any]) -> None:
    """Blocks of an earlier attempt may have the same ids and belong to the same prompt."""
    remote = a_remote(a_prompt(70))
    assert contents_digest(msgspec.structs.replace(remote, **changes)) != contents_digest(remote)
    assert contents_digest(msgspec.structs.replace(remote, remote_host="elsewhere")) == contents_digest(remote)
