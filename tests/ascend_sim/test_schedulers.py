"""The schedulers that vllm-ascend can put in the place of vLLM's, and that work with the connector."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.ascend import preempted_requests, scarce_blocks
from tests.support.ascend.device_process import on_device
from tests.support.ascend.engine_process import output_of, output_of_start
from tests.support.ascend.paths import ascend_release
from tests.support.ascend.servers import SCHEDULERS, block_bytes
from tests.support.e2e.deployments import on
from tests.support.e2e.models import DEFAULT_MODEL, write_model
from tests.support.e2e.pair import Pair, make_prompt


@on(SCHEDULERS)
@pytest.mark.parametrize("pair", [("P", "D balance")], indirect=True, ids="-".join)
class TestBalanceScheduler:
    """One engine has nobody to balance with; the scheduler's own ``schedule`` is in use all the same."""

    def test_a_pulled_prompt_gives_the_same_output(self, pair: Pair) -> None:
        pair.assert_pulls_right(make_prompt(1000, (pair.name, "balance")))

    def test_concurrent_prompts_give_the_same_outputs(self, pair: Pair) -> None:
        pair.assert_concurrent_pulls_right(4)


@on(SCHEDULERS)
@pytest.mark.parametrize("pair", [("P", "D recompute"), ("P", "D recompute, no prefixes")], indirect=True, ids="-".join)
class TestRecomputeScheduler:
    def test_pulled_prompts_that_are_preempted_give_the_answers_that_they_give_alone(self, pair: Pair) -> None:
        """They go on from what D holds of them, or D computes all again: the lease of the pull has ended."""
        prompts = [make_prompt(360, (pair.name, "preempted", number)) for number in range(6)]
        with pair.traffic() as traffic, ThreadPoolExecutor(len(prompts)) as clients:
            together = list(clients.map(lambda prompt: pair.disaggregate(prompt, 160), prompts))
        assert traffic.decode is not None
        assert traffic.decode.value("vllm:num_preemptions_total") > 0
        assert traffic.pulled("pulls") == len(prompts)
        assert traffic.failures() == 0
        for prompt, completion in zip(prompts, together, strict=True):
            assert len(completion.tokens) == 160
            pair.assert_right(completion, prompt)


@pytest.mark.parametrize("switched_on", [True, False])
def test_the_option_switches_it_on_in_an_engine_with_the_connector(tmp_path: Path, switched_on: bool) -> None:
    model = write_model(tmp_path / "model", DEFAULT_MODEL)
    status, output = output_of_start(model, additional_config={"enable_balance_scheduling": switched_on})
    assert status == 0, output[-4000:]
    [scheduler] = re.findall(r"^SCHEDULER (.*)$", output, re.MULTILINE)
    assert " BalanceScheduler " in scheduler
    assert scheduler.endswith(str(switched_on))


@pytest.mark.parametrize(
    ("options", "host_blocks"),
    [((), 0), ((), 64), (("--no-enable-prefix-caching",), 0)],
    ids=["device only", "host memory", "no prefix caching"],
)
def test_the_recompute_scheduler_lets_preempted_requests_come_back(
    tmp_path: Path, options: tuple[str, ...], host_blocks: int
) -> None:
    """It ends none of them as "recomputed": they go on from what is held of them, or compute all again.

    The recipes' proxy would send a chat with the text so far behind its first message, which is another question.
    """
    model = write_model(tmp_path / "model", DEFAULT_MODEL)
    host_bytes = host_blocks * block_bytes(DEFAULT_MODEL)
    status, output = output_of(preempted_requests.__name__, str(model), str(host_bytes), *options)
    assert status == 0, output[-4000:]
    found = json.loads(output.rpartition("FOUND ")[2].splitlines()[0])
    assert "RecomputeScheduler" in found["scheduler"]
    assert found["back"] > 0
    assert bool(found["loaded"]) is bool(host_blocks)
    assert found["together"] == found["alone"]
    assert all(end == ["length", None] for _, *end in found["together"])


@pytest.mark.parametrize(
    ("role", "options", "scheduler"),
    [
        ("kv_producer", {}, "BalanceScheduler"),
        ("kv_both", {"enable_balance_scheduling": True}, "BalanceScheduler"),
        ("kv_consumer", {"recompute_scheduler_enable": True}, "RecomputeScheduler"),
    ],
    ids=["prefill", "balance", "decode recompute"],
)
def test_requests_that_hold_all_blocks_and_lack_some_do_not_wait_for_each_other(
    tmp_path: Path, role: str, options: dict[str, bool], scheduler: str
) -> None:
    """Prompts that host memory holds in part, and answers, which may begin a block each."""
    model, host_bytes = write_model(tmp_path / "model", DEFAULT_MODEL), 64 * block_bytes(DEFAULT_MODEL)
    status, output = output_of(scarce_blocks.__name__, str(model), str(host_bytes), role, json.dumps(options))
    assert status == 0, output[-4000:]
    found = json.loads(output.rpartition("FOUND ")[2].splitlines()[0])
    assert scheduler in found["scheduler"]
    assert [len(tokens) for tokens in found["first tokens"]] == [1, 1, 1, 1]
    assert found["loaded"][:4] == [5, 5, 2, 6]
    assert [len(tokens) for tokens in found["together"]] == [64, 64, 64]
    assert found["together"] == found["alone"]


@pytest.mark.ascend_short
@pytest.mark.skipif(ascend_release() == "0.23", reason="vllm-ascend 0.23 has no ring")
def test_a_ring_into_which_a_prompt_is_pulled_is_not_zeroed() -> None:
    """Behind a prefix that D has, vLLM 0.30 would zero it: the ring has its place at the first tokens."""
    on_device("""
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm_ascend.core.kv_cache_interface import AscendIndexerKPoolTailSpec, register_ascend_kv_cache_specs
from pd_connector.vllm.device_blocks import DeviceBlocks

register_all_kvcache_specs(None)
register_ascend_kv_cache_specs()
full = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
tail = AscendIndexerKPoolTailSpec(
    block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=4, compress_ratio=4
)
groups = [KVCacheGroupSpec(["layer"], full), KVCacheGroupSpec(["ring"], tail)]
config = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)
assert config.needs_kv_cache_zeroing
manager = KVCacheManager(
    config, max_model_len=1024, scheduler_block_size=16, hash_block_size=16, max_in_flight_tokens=1024,
    enable_caching=True,
)
blocks = DeviceBlocks()
blocks.bind(manager)
init_none_hash(sha256_cbor)
hasher = get_request_block_hasher(16, sha256_cbor)

def request(name, tokens):
    made = Request(name, list(range(tokens)), SamplingParams(max_tokens=1), None, block_hasher=hasher)
    made.num_in_flight_tokens = 0
    return made

first = request("first", 33)
manager.new_step_starts()
assert manager.allocate_slots(first, 33)
manager.free(first)
manager.take_new_block_ids()

second = request("second", 65)
manager.new_step_starts()
found, tokens = manager.get_computed_blocks(second)[:2]
assert tokens == 32, tokens
assert manager.allocate_slots(
    second, 0, num_new_computed_tokens=tokens, new_computed_blocks=found, num_external_computed_tokens=32,
    delay_cache_blocks=True,
)
own = manager.get_block_ids("second")
left_out = manager.get_zeroing_block_ids_in_range("second", tokens, 64)
assert left_out == own[0][2:4], "vLLM leaves the ring out by itself"
blocks.leave_unzeroed("second", [1])
assert set(manager.take_new_block_ids()) - set(left_out) == set(), own
""")


@pytest.mark.ascend_short
@pytest.mark.skipif(ascend_release() == "0.23", reason="hybrids are refused on vLLM 0.23")
def test_states_are_named_by_the_tokens_that_they_are_of() -> None:
    """Whatever steps have room for, on engines of every role, of models with pooled indexers, too."""
    on_device("""
from itertools import cycle, product
from types import SimpleNamespace
import vllm_ascend.patch.platform
from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request
from pd_connector.vllm.npu.aligned_chunks import align_chunks

align_chunks()
aligned = Scheduler._mamba_block_aligned_split
align_chunks()
assert Scheduler._mamba_block_aligned_split is aligned
register_all_kvcache_specs(None)
block = 16
full = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
states = MambaSpec(block_size=block, shapes=((64,),), dtypes=(torch.float32,), mamba_cache_mode="align")
groups = [KVCacheGroupSpec(["layer"], full), KVCacheGroupSpec(["state"], states)]
config = KVCacheConfig(num_blocks=64, kv_cache_tensors=[], kv_cache_groups=groups)
init_none_hash(sha256_cbor)
hasher = get_request_block_hasher(block, sha256_cbor)

def request(tokens):
    made = Request("r", list(range(tokens)), SamplingParams(max_tokens=9), None, block_hasher=hasher)
    made.num_in_flight_tokens = 0
    return made

def scheduler(role, pooled, most):
    model = SimpleNamespace(index_topk=8, index_kpool=4) if pooled else SimpleNamespace()
    return SimpleNamespace(
        vllm_config=SimpleNamespace(
            kv_transfer_config=KVTransferConfig(kv_connector="PDConnector", kv_role=role),
            model_config=SimpleNamespace(hf_text_config=model),
        ),
        cache_config=SimpleNamespace(block_size=block), block_size=block, hash_block_size=block,
        kv_cache_config=config, use_eagle=False, use_eagle_block_drop=False, mamba_partial_cache_hit=False,
        mamba_fine_grained_prefix_cache=False, mamba_has_prefill_checkpoint_blocks=False,
        max_num_scheduled_tokens=most, scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
    )

def serve(engine, prompt, rooms):
    manager = KVCacheManager(
        config, max_model_len=1024, scheduler_block_size=block, hash_block_size=block, max_in_flight_tokens=1024,
        enable_caching=True,
    )
    served, written, ends, rooms = request(prompt), {}, [], cycle(rooms)
    while served.num_computed_tokens < prompt:
        manager.new_step_starts()
        room = min(next(rooms), prompt - served.num_computed_tokens)
        tokens = Scheduler._mamba_block_aligned_split(engine, served, room)
        assert 0 <= tokens <= room, (tokens, room)
        if not tokens:  # it waits for a step with more room
            continue
        end = served.num_computed_tokens + tokens
        assert manager.allocate_slots(served, tokens) is not None
        written[manager.get_block_ids("r")[1][(end - 1) // block]] = end
        served.num_computed_tokens = end
        ends.append(end)
        for state in manager.block_pool.blocks:
            if state.block_hash is not None and state.block_id in written:
                assert state.block_hash_num_tokens == written[state.block_id], (ends, state)
    return ends

for role, pooled in product(("kv_consumer", "kv_both", "kv_producer"), (False, True)):
    for rooms in ((7,), (16,), (20,), (33,), (200,), (40, 5), (33, 7, 11)):
        for prompt in (1, 15, 16, 17, 48, 100):
            ends = serve(scheduler(role, pooled, max(rooms)), prompt, rooms)
            assert prompt < block or prompt // block * block in ends, (role, pooled, rooms, ends)
assert serve(scheduler("kv_consumer", False, 40), 100, (40,)) == [32, 64, 96, 100]
pulled = scheduler("kv_consumer", False, 40)
assert Scheduler._mamba_block_aligned_split(pulled, request(30), 4, 0, 29) == 4, "a token and drafts, past a border"
""")
