"""The names of blocks that two engines must have in common: vLLM's own."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from pd_connector.vllm import block_hashes
from pd_connector.vllm.block_hashes import BlockHashes

TOKENS = 100


def engine(algorithm: str = "sha256_cbor") -> BlockHashes:
    config: Any = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm))
    return BlockHashes(config)


def a_request(block_tokens: int, **more: Any) -> Request:
    hasher = get_request_block_hasher(block_tokens, get_hash_fn_by_name("sha256_cbor"))
    return Request("r", list(range(TOKENS)), SamplingParams(max_tokens=8), None, block_hasher=hasher, **more)


@pytest.fixture(autouse=True)
def _seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", None, raising=False)  # set by whatever ran before, if anything did
    init_none_hash(get_hash_fn_by_name("sha256_cbor"))


@pytest.mark.parametrize("salt", [None, "secret"])
@pytest.mark.parametrize("theirs", [16, 32])
def test_a_prompt_is_hashed_as_an_engine_with_other_blocks_hashes_it(theirs: int, salt: str | None) -> None:
    there = a_request(theirs, cache_salt=salt)
    assert list(engine().of_prompt(a_request(16, cache_salt=salt), theirs, 16)) == list(there.block_hashes)
    assert len(there.block_hashes) == TOKENS // theirs


def test_no_more_is_hashed_than_may_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_hashes, "MAX_HASHES", 3)
    hashes = engine(), get_hash_fn_by_name("sha256_cbor")
    with patch.object(BlockHashes, "_function", side_effect=hashes[1]) as hashing:
        assert list(hashes[0].of_prompt(a_request(16), 4, 16)) == list(a_request(4).block_hashes[:3])
    assert hashing.call_count == 3


def test_tokens_that_were_sampled_are_not_of_the_prompt() -> None:
    request = a_request(16)
    request.append_output_token_ids(list(range(20)))
    for theirs in (16, 4):
        assert len(engine().of_prompt(request, theirs, 16)) == TOKENS // theirs


def test_two_engines_tell_whether_they_hash_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine().hashing == engine().hashing != engine("sha256").hashing
    ours = engine().hashing
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"another seed")
    assert engine().hashing != ours
