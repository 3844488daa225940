"""Answers that must be equal in every bit, whatever a device's kernels make of other batches.

Kernels round in another way where they compute more tokens at once. So a prompt here is a whole number of blocks and
one token: D computes that token alone after a pull, as a server does that has the blocks in its prefix cache. Where
vLLM has no such cache, answers are equal but for rounding.
"""

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.support.e2e.client import Completion
from tests.support.e2e.cluster import Server
from tests.support.e2e.pair import Pair, Traffic, assert_same_output, make_prompt

ANSWER_TOKENS = 12
_SALTS: Iterator[int] = itertools.count()


def exact_prompt(units: int, unit: int, seed: object) -> list[int]:
    """``units`` times ``unit`` random tokens, and one. ``unit``: a multiple of both sides' block sizes."""
    return make_prompt(units * unit + 1, seed)


def has_prefix_cache(server: Server) -> bool:
    """Whether vLLM finds prefixes: not those of MLA on the CPU."""
    return server.spec.platform != "cpu" or server.spec.model.architecture != "deepseek_v2"


def alone(server: Server, prompt: list[int]) -> Completion:
    """What the server answers by itself, of which it computes the prompt's last token as it does after a pull."""
    if not has_prefix_cache(server):
        return server.client.compute(prompt, ANSWER_TOKENS)
    salt = f"alone {next(_SALTS)}"
    assert server.client.complete(prompt, 1, cache_salt=salt).status == 200
    before = server.client.metrics()
    completion = server.client.complete(prompt, ANSWER_TOKENS, cache_salt=salt)
    assert completion.status == 200, completion.body
    computed = server.client.metrics().since(before).prompt_tokens("local_compute")
    assert computed == 1, f"the reference has computed {computed} tokens of the prompt"
    return completion


def assert_same_bits(a: Completion, b: Completion) -> None:
    """Equal tokens, and log-probabilities that are equal in every bit."""
    assert (a.status, b.status) == (200, 200), f"{a.body} {b.body}"
    assert a.tokens == b.tokens
    assert a.logprobs == b.logprobs, f"log-probabilities differ by up to {a.logprob_difference(b):g}"


def assert_pulls_exactly(pair: Pair, prompt: list[int]) -> Traffic:
    """A prompt that D holds nothing of is pulled whole, and answered with the bits that D computes alone."""
    wanted = alone(pair.decode, prompt)
    traffic, completion = pair.assert_pulls_all(prompt, ANSWER_TOKENS)
    (assert_same_bits if has_prefix_cache(pair.decode) else assert_same_output)(completion, wanted)
    return traffic


def assert_pull_at_once_exactly(pair: Pair, prompts: Sequence[list[int]]) -> None:
    """Prompts are all pulled at the same time; what arrived gives the bits that D computes alone.

    P computes them one by one, and D is asked again one by one, of the blocks that were pulled: together they may be
    rounded in other ways.
    """
    wanted = [alone(pair.decode, prompt) for prompt in prompts]
    with pair.traffic() as traffic, ThreadPoolExecutor(len(prompts)) as clients:
        params = [pair.prefill.client.prefill(prompt) for prompt in prompts]
        answers = list(clients.map(pair.decode_leg, prompts, params, itertools.repeat(ANSWER_TOKENS)))
    assert (traffic.pulled("pulls"), traffic.failures()) == (len(prompts) * pair.decode_ranks, 0)
    assert [answer.status for answer in answers] == [200] * len(prompts)
    if has_prefix_cache(pair.decode):
        assert_held_exactly(pair.decode, prompts, wanted)
        return
    for answer, each in zip(answers, wanted, strict=True):
        assert_same_output(answer, each)


def assert_held_exactly(server: Server, prompts: Sequence[list[int]], wanted: Sequence[Completion]) -> None:
    """The server has these prompts, but for their last tokens, and answers with these bits."""
    for prompt, each in zip(prompts, wanted, strict=True):
        before = server.client.metrics()
        again = server.client.complete(prompt, ANSWER_TOKENS)
        assert server.client.metrics().since(before).prompt_tokens("local_compute") == 1
        assert_same_bits(again, each)
