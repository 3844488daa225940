"""``kv_transfer_params``: what a prefill engine answers, a router relays, and a decode engine believes."""

import json
import re
from typing import Any

import msgspec
import pytest

from pd_connector.params import (
    ParamsError,
    RemotePrefill,
    check_prompt,
    contents_digest,
    is_decode_leg,
    is_malformed,
    is_prefill_leg,
    parse_remote_prefill,
    prompt_digest,
)
from tests.support.connector.requests import a_prompt, a_remote

PROMPT = a_prompt(70)
DIGEST = prompt_digest(PROMPT, ())
REMOTE = a_remote(PROMPT)


def parse(params: dict[str, Any]) -> RemotePrefill:
    remote = parse_remote_prefill(params)
    check_prompt(remote, len(PROMPT), DIGEST)
    return remote


def test_params_survive_the_way_through_a_router() -> None:
    assert parse(json.loads(json.dumps(REMOTE.to_params()))) == REMOTE


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
    ("tp_size", "1"),
    ("lease_id", ""),
    ("lease_id", 9),
    ("lease_ttl_s", 0),
    ("lease_ttl_s", -3.0),
    ("lease_ttl_s", float("nan")),
    ("lease_ttl_s", "30"),
    ("prompt_digest", None),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_wrong_field_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ParamsError, match=f"{field}"):
        parse({**REMOTE.to_params(), field: value})


def test_every_field_has_a_wrong_value_here() -> None:
    assert {field for field, _ in WRONG} == {field.name for field in msgspec.structs.fields(RemotePrefill)}


def test_another_number_of_tokens_is_refused_with_both_numbers() -> None:
    with pytest.raises(ParamsError, match="computed 70 prompt tokens and this request has 71"):
        check_prompt(REMOTE, 71, prompt_digest(a_prompt(71), ()))


def test_another_prompt_of_the_same_length_is_refused_with_both_digests() -> None:
    other = prompt_digest(a_prompt(70, seed=1), ())
    with pytest.raises(ParamsError, match=f"digest {DIGEST}.*{other}"):
        check_prompt(REMOTE, 70, other)


def test_a_prompt_without_token_ids_is_compared_by_length_only() -> None:
    check_prompt(REMOTE, 70, "")
    embeds = msgspec.structs.replace(REMOTE, prompt_digest="")
    check_prompt(embeds, 70, DIGEST)


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
    ],
    ids=str,
)
def test_whoever_alters_what_is_to_be_read_changes_the_digest(change: dict[str, Any]) -> None:
    assert contents_digest(msgspec.structs.replace(REMOTE, **change)) != contents_digest(REMOTE)
