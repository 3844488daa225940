"""All layers of a block together on simulated NPUs, by vllm-ascend's own operators; and apart where these fail."""

import re
from pathlib import Path

import pytest

from tests.support.ascend import faulty_operators
from tests.support.ascend.engine_process import output_of
from tests.support.ascend.faulty_operators import NEW_TOKENS, PROMPT
from tests.support.ascend.paths import ascend_release
from tests.support.ascend.reference import transformers_answers
from tests.support.ascend.servers import (
    NPU_BLOCK_SIZE,
    NPU_MLA,
    NPU_SLIDING_WINDOW,
    ONE_RANK,
    SEVERAL_RANKS,
    block_bytes,
    worker_block_bytes,
)
from tests.support.e2e.cluster import Server
from tests.support.e2e.deployments import on
from tests.support.e2e.models import DEFAULT_MODEL, write_model
from tests.support.e2e.pair import Pair, make_prompt

APART = "each layer's KV cache is allocated apart: "
TOGETHER = "the KV caches of {} layers are allocated together, {} bytes of each block in 2 runs"

#: vllm-ascend 0.23 hands a dense copy of the cache to its attention operator, but for MLA.
takes_strides = pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 would copy its caches")


def log_of(server: Server) -> str:
    return server.log.read_text(errors="replace")


def assert_one_descriptor_for_each_block_and_part(pair: Pair) -> None:
    """What arrives is compared by checksums; answers of pairs of these kinds are compared elsewhere."""
    prompt = make_prompt(1500, (pair.name, "one descriptor"))
    traffic, _ = pair.assert_pulls_all(prompt)
    blocks = -(-len(prompt) // NPU_BLOCK_SIZE)
    assert 0 < traffic.pulled("pull_descriptors") <= 2 * blocks * pair.decode_ranks
    for server in (pair.prefill, pair.decode):
        layers, size = server.spec.model.layers, worker_block_bytes(server.spec)
        assert log_of(server).count(TOGETHER.format(layers, size)) == server.spec.tensor_parallel


@takes_strides
@pytest.mark.ascend_short
@on(ONE_RANK)
@pytest.mark.parametrize("pair", [("P", "D")], indirect=True, ids="-".join)
def test_a_pull_has_one_descriptor_for_each_block_and_part(pair: Pair) -> None:
    assert_one_descriptor_for_each_block_and_part(pair)
    size = block_bytes(DEFAULT_MODEL)
    assert f"the same geometry; {size} bytes in 2 runs for each {NPU_BLOCK_SIZE} tokens" in log_of(pair.decode)
    assert re.search(rf"host blocks of {size} bytes .* copied by the acl backend in 2 runs", log_of(pair.decode))


@takes_strides
@on(SEVERAL_RANKS)
@pytest.mark.parametrize("pair", [("TP2", "other TP2")], indirect=True, ids="-".join)
def test_so_has_that_of_each_of_several_ranks(pair: Pair) -> None:
    assert_one_descriptor_for_each_block_and_part(pair)


@takes_strides
@on(SEVERAL_RANKS)
@pytest.mark.parametrize("pair", [("TP1", "TP2"), ("TP2", "TP1")], indirect=True, ids="-".join)
def test_a_rank_reads_each_block_of_each_rank_that_has_its_heads_in_two_runs(pair: Pair) -> None:
    prompt = make_prompt(1500, (pair.name, "two runs"))
    traffic, _ = pair.assert_pulls_all(prompt)
    blocks = -(-len(prompt) // NPU_BLOCK_SIZE)
    assert 0 < traffic.pulled("pull_descriptors") <= 2 * blocks * 2  # two ranks read one, or one reads two


@on(NPU_MLA)
@pytest.mark.parametrize("pair", [("TP1", "TP2"), ("TP2", "TP1")], indirect=True, ids="-".join)
def test_so_has_that_of_the_parts_of_mla(pair: Pair) -> None:
    assert_one_descriptor_for_each_block_and_part(pair)


@on(NPU_SLIDING_WINDOW)
@pytest.mark.parametrize("server", ["TP1"], indirect=True)
def test_several_cache_groups_stay_apart(server: Server) -> None:
    assert APART + "the model has 3 groups of layers with block tables of their own" in log_of(server)


@takes_strides
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("none", "layers are allocated together"),
        ("ignores", "fail their check .*: after writing in step 0 the cache holds other bytes"),
        ("copies", "fail their check .*: attention in step 0 takes [0-9]+ bytes more, as if it copied the cache"),
        ("wraps", "fail their check on the last blocks .*: after writing in step 0 the cache holds other bytes"),
        ("refuses", "fail their check .*: writing raises RuntimeError: the stride of keyCache is not supported"),
    ],
)
def test_operators_that_fail_leave_the_allocation_as_it_was_and_the_answers_right(
    tmp_path: Path, fault: str, said: str
) -> None:
    model = write_model(tmp_path / "model", DEFAULT_MODEL)
    status, output = output_of(faulty_operators.__name__, fault, str(model))
    assert status == 0, output[-4000:]
    assert re.search(said, output), output[-4000:]
    assert ("allocated apart" in output) is (fault != "none")
    [tokens] = re.findall(r"^TOKENS \[(.*)\]$", output, re.MULTILINE)
    assert [[int(token) for token in tokens.split(", ")]] == transformers_answers(model, [PROMPT], NEW_TOKENS)
