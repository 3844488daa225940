"""A prefill server that computes other keys and values than the decode server is found before an answer is wrong.

That equal ones are proven, every other test with two servers shows: its first request is a canary.
"""

from dataclasses import replace

import pytest

from tests.support.e2e.architectures import SHORT_CONTEXT
from tests.support.e2e.client import Completion
from tests.support.e2e.cluster import Server, ServerSpec
from tests.support.e2e.deployments import PATIENT, Deployment, decode, on, prefill
from tests.support.e2e.models import ModelSpec
from tests.support.e2e.pair import Pair, make_prompt
from tests.support.waiting import until


def rotating(spec: ServerSpec, longest: int) -> ServerSpec:
    """The server with a model whose keys depend on ``--max-model-len``. Nothing that it declares is compared."""
    options = (*PATIENT, ("model_check", "off"), ("canary", "refuse"))
    arguments = ("--max-model-len", str(longest))
    return replace(spec, model=ModelSpec(architecture="phi3"), layout=None, arguments=arguments, options=options)


#: The same directory and unequal keys: D serves long contexts, and P does not. Only what they compute can show it.
UNEQUAL_KEYS = Deployment(
    "unequal keys", (("P", rotating(prefill(), SHORT_CONTEXT)), ("D", rotating(decode("fail"), 2 * SHORT_CONTEXT)))
)

pytestmark = [pytest.mark.failures, pytest.mark.slow, on(UNEQUAL_KEYS)]


def test_no_answer_is_made_of_keys_that_were_rotated_by_other_factors(servers: dict[str, Server]) -> None:
    """LongRoPE, with a ``--max-model-len`` on either side of where it changes. The first answer is D's, others fail."""
    pair = Pair(servers["P"], servers["D"])
    prompts = [make_prompt(tokens, ("unequal keys", tokens)) for tokens in (200, 150, 100)]
    start, mark = pair.decode.client.metrics(), pair.decode.log_size

    def canaries(outcome: str) -> int:
        added = pair.decode.client.metrics().since(start)
        return int(added.value("vllm:pd_canaries_total", outcome=outcome))

    def answer(prompt: list[int]) -> Completion:
        return pair.decode_leg(prompt, pair.prefill.client.prefill(prompt))

    pair.assert_right(answer(prompts[0]), prompts[0])
    until(lambda: canaries("differs"))
    for prompt in prompts[1:]:
        assert answer(prompt).status == 500
    pair.wait_until_at_rest()
    added = pair.decode.client.metrics().since(start)
    assert added.value("vllm:pd_pulls_total") == 0
    assert added.value("vllm:pd_pull_failures_total", cause="canary") == len(prompts) - 1
    assert canaries("proven") == 0
    log = pair.decode.log_since(mark)
    assert "computes other keys and values than this engine: layer 'model.layers.0.self_attn.attn', part 'k'" in log
    assert (
        "Nothing is pulled from there for as long as it lives; serve the same weights, adapters, --max-model-len" in log
    )
