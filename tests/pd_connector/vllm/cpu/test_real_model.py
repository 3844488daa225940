"""A real model, run by vLLM in one process, gives the same answers in every layout that its CPU workers offer."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what torch and vLLM deprecate of each other is not ours

from tests.support.connector.cpu_layers import cpu_only

pytestmark = cpu_only

#: Runs several engines in one process: the first without our connector, the others with it.
ENGINES = """
import json, os, sys
import pd_connector
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from pd_connector.vllm.layouts import wanted_layout


class PDConnector(KVConnectorBase_V1, SupportsHMA):
    '''Moves nothing: only the layout is asked for.'''

    get_required_kvcache_layout = staticmethod(wanted_layout)

    def nothing(self, *args, **kwargs):
        return None

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = update_state_after_alloc = nothing

    def get_num_new_matched_tokens(self, request, computed):
        return 0, False

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request, block_ids):
        return False, None


pd_connector.PDConnector = PDConnector
prompts = [{"prompt_token_ids": [(7 * i + 3 * j * j) % 500 + 3 for i in range(n)]} for j, n in enumerate((40, 150, 77))]
sampling = SamplingParams(max_tokens=12, temperature=0, logprobs=3, ignore_eos=True)
answers = []
for forced in ("", "default", "BLHNC", "LBHNC"):
    os.environ.pop("VLLM_KV_CACHE_LAYOUT", None)
    if forced.isupper():
        os.environ["VLLM_KV_CACHE_LAYOUT"] = forced
    ours = dict(kv_connector="PDConnector", kv_connector_module_path="pd_connector", kv_role="kv_both")
    llm = LLM(
        model=sys.argv[1], dtype="float32", enforce_eager=True, block_size=32, max_model_len=256,
        skip_tokenizer_init=True, kv_cache_memory_bytes=8 << 20,
        kv_transfer_config=KVTransferConfig(**ours) if forced else None,
    )
    outputs = [output.outputs[0] for output in llm.generate(prompts, sampling, use_tqdm=False)]
    answers.append({
        "layout": llm.llm_engine.vllm_config.cache_config.kv_cache_layout,
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [[[(k, v.logprob) for k, v in step.items()] for step in output.logprobs] for output in outputs],
    })
    del llm
json.dump(answers, open(sys.argv[2], "w"))
"""

#: Untied embeddings and a wide initialisation: the tokens depend on every block.
MODEL = """
import sys
import torch, transformers
torch.manual_seed(0)
sizes = dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4,
             head_dim=32, tie_word_embeddings=False, initializer_range=0.15, max_position_embeddings=512)
if sys.argv[2] == "full":
    config = transformers.Qwen3Config(num_hidden_layers=4, **sizes)
    model = transformers.Qwen3ForCausalLM(config)
else:
    config = transformers.Gemma3TextConfig(num_hidden_layers=6, sliding_window_pattern=3, sliding_window=128,
                                           query_pre_attn_scalar=32, **sizes)
    model = transformers.Gemma3ForCausalLM(config)
model.save_pretrained(sys.argv[1])
"""


def run_python(code: str, *arguments: str) -> str:
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    environment.pop("VLLM_KV_CACHE_LAYOUT", None)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.layouts
@pytest.mark.parametrize("attention", ["full", "sliding window and full"])
def test_a_model_gives_the_same_tokens_and_logprobs_in_every_layout(tmp_path: Path, attention: str) -> None:
    run_python(MODEL, str(tmp_path / "model"), attention)
    output = run_python(ENGINES, str(tmp_path / "model"), str(tmp_path / "answers.json"))
    plain, *others = json.loads((tmp_path / "answers.json").read_text())
    assert [answer.pop("layout") for answer in (plain, *others)] == ["LBHNC", "BHLNC", "BLHNC", "LBHNC"]
    assert all(answer == plain for answer in others)
    assert all(len(set(tokens)) > 3 for tokens in plain["tokens"])  # not one token over and over
    assert output.count("work in BHLNC, BLHNC") == 3  # once for each engine with the connector
    assert "does not satisfy every supported set" not in output
