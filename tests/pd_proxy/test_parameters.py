"""What each leg is sent, without any HTTP."""

import copy
from typing import Any

import pytest

from pd_proxy.apis import CHAT, COMPLETIONS, GENERATE
from pd_proxy.parameters import decode_body, prefill_body, undivided_reason

A_CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
A_TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hello"}

REACHES_THE_PROMPT: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}],
    "tool_choice": {"type": "function", "function": {"name": "look_up"}},
    "parallel_tool_calls": False,
    "response_format": {"type": "json_object"},
    "reasoning_effort": "high",
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"enable_thinking": False},
    "documents": [{"title": "t", "text": "x"}],
    "add_generation_prompt": False,
    "continue_final_message": True,
    "add_special_tokens": True,
    "truncate_prompt_tokens": 100,
    "truncation_side": "left",
    "mm_processor_kwargs": {"crops": 4},
    "cache_salt": "salt",
    "priority": 3,
    "user": "somebody",
    "vllm_xargs": {"mine": 1},
    "a_parameter_of_next_year": {"any": "thing"},
}

BREAKS_OR_CHANGES_ONE_TOKEN: dict[str, Any] = {
    "stream_options": {"include_usage": True},
    "best_of": 3,
    "min_tokens": 20,
    "stop": ["a"],
    "stop_token_ids": [1, 2],
    "include_stop_str_in_output": True,
    "repetition_detection": {"max_pattern_size": 4},
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 7,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.1,
    "length_penalty": 2.0,
    "logit_bias": {"7": 100},
    "allowed_token_ids": [7],
    "bad_words": ["bad"],
    "watermarking": True,
    "structured_outputs": {"choice": ["a", "b"]},
    "thinking_token_budget": 0,
    "trace_decode_token_ids": [7],
    "logprobs": True,
    "top_logprobs": 5,
    "logprob_token_ids": [1],
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "return_token_offsets": True,
    "return_prompt_text": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stream_interval": 8,
    "output_mode": "text",
}


def test_the_prefill_leg_keeps_all_that_can_reach_the_prompt() -> None:
    sent = prefill_body(CHAT, A_CHAT | REACHES_THE_PROMPT)
    assert {name: sent[name] for name in A_CHAT | REACHES_THE_PROMPT} == A_CHAT | REACHES_THE_PROMPT


def test_the_prefill_leg_loses_all_that_could_break_or_shape_its_one_token() -> None:
    sent = prefill_body(CHAT, A_CHAT | BREAKS_OR_CHANGES_ONE_TOKEN)
    assert sent.keys() & BREAKS_OR_CHANGES_ONE_TOKEN.keys() == set()


@pytest.mark.parametrize("chat", [True, False])
def test_the_prefill_leg_asks_for_one_token_in_one_piece_that_cannot_end_early(chat: bool) -> None:
    wishes = {"max_tokens": 500, "n": 1, "stream": True, "ignore_eos": False, "temperature": 1.7}
    sent = prefill_body(CHAT if chat else COMPLETIONS, (A_CHAT if chat else A_TEXT) | wishes)
    assert [sent[name] for name in wishes] == [1, 1, False, True, 0.0]


def test_both_limits_of_a_chat_are_one_since_the_newer_wins() -> None:
    assert prefill_body(CHAT, A_CHAT | {"max_completion_tokens": 900})["max_completion_tokens"] == 1
    assert "max_completion_tokens" not in prefill_body(COMPLETIONS, A_TEXT)


def test_a_text_completion_needs_no_grammar_on_the_prefill_leg() -> None:
    assert "response_format" not in prefill_body(COMPLETIONS, A_TEXT | {"response_format": {"type": "json_object"}})


def test_the_prefill_leg_asks_for_a_transfer_whatever_the_client_wrote() -> None:
    own = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"}}
    sent = prefill_body(COMPLETIONS, A_TEXT | own)
    assert sent["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }


def test_the_decode_leg_is_the_clients_body_with_the_transfer() -> None:
    body = A_CHAT | REACHES_THE_PROMPT | BREAKS_OR_CHANGES_ONE_TOKEN | {"stream": True, "max_tokens": 9}
    transfer = {"remote_host": "10.0.0.1", "anything": [1, {"else": None}]}
    assert decode_body(COMPLETIONS, body, transfer) == body | {"kv_transfer_params": transfer}


def test_a_clients_own_transfer_reaches_no_decode_server() -> None:
    assert decode_body(COMPLETIONS, A_TEXT | {"kv_transfer_params": {"remote_host": "evil"}}, None) == A_TEXT


@pytest.mark.parametrize("value", ["x", ["a", 1], {"do_remote_prefill": True, "remote_host": "evil"}], ids=str)
@pytest.mark.parametrize("chat", [True, False])
def test_a_clients_own_transfer_among_the_extra_arguments_reaches_no_server(chat: bool, value: object) -> None:
    api = CHAT if chat else COMPLETIONS
    body = (A_CHAT if chat else A_TEXT) | {"vllm_xargs": {"kv_transfer_params": value, "mine": 1}}
    for sent in (decode_body(api, body, None), decode_body(api, body, {"b": 2}), prefill_body(api, body)):
        assert sent["vllm_xargs"] == {"mine": 1}
    assert decode_body(COMPLETIONS, body | {"vllm_xargs": "not an object"}, None)["vllm_xargs"] == "not an object"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in what vLLM imports
@pytest.mark.parametrize("chat", [True, False])
def test_vllm_takes_a_transfer_from_no_other_place_in_a_clients_body(chat: bool) -> None:
    """vLLM's own classes judge what D is sent where it serves alone."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415  seconds
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest  # noqa: PLC0415

    kind = ChatCompletionRequest if chat else CompletionRequest
    inner = {"kv_transfer_params": {"do_remote_prefill": True}}
    extra = {"vllm_xargs": {"kv_transfer_params": "x"}}
    taken = kind.model_validate((A_CHAT if chat else A_TEXT) | copy.deepcopy(extra)).to_sampling_params(9, {})
    assert taken.extra_args == extra["vllm_xargs"], "nothing would have to be dropped there"
    body = (A_CHAT if chat else A_TEXT) | inner | extra
    for name in ("extra_args", "extra_body", "sampling_params", "metadata", "kv_hints"):
        body[name] = inner | {"vllm_xargs": inner, "extra_args": inner}
    sampling = kind.model_validate(decode_body(COMPLETIONS, body, None)).to_sampling_params(9, {})
    assert not sampling.extra_args


def test_the_clients_body_is_not_changed() -> None:
    body = A_CHAT | {"stream": True, "kv_transfer_params": {"a": 1}, "vllm_xargs": {"kv_transfer_params": "x"}}
    before = copy.deepcopy(body)
    prefill_body(CHAT, body)
    decode_body(COMPLETIONS, body, {"b": 2})
    assert body == before


@pytest.mark.parametrize("prompt", ["text", ["one text"], [1, 2, 3], [[1, 2, 3]], [7], [[7]]], ids=str)
def test_one_prompt_in_any_form_takes_both_legs(prompt: object) -> None:
    assert undivided_reason(COMPLETIONS, {"prompt": prompt}) is None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"prompt": [[1, 2], [3]]}, "several prompts"),
        ({"prompt": None, "prompt_embeds": "AAAA"}, "prompt embeddings"),
        ({"prompt": "a", "prompt_embeds": ["AAAA"]}, "prompt embeddings"),
        ({"prompt": "a", "n": 0}, "an invalid number of samples"),
        ({"prompt": "a", "n": "2"}, "an invalid number of samples"),
        ({"prompt": "a", "use_beam_search": True}, "beam search"),
        ({"prompt": "a", "prompt_logprobs": 0}, "prompt log-probabilities"),
        ({"prompt": "a", "echo": True, "logprobs": 0}, "prompt log-probabilities"),
        ({"prompt": "a", "echo": True, "max_tokens": 0}, "no tokens to generate"),
        ({"prompt": "a", "truncate_prompt_tokens": -1}, "a prompt cut to what the output leaves"),
    ],
    ids=str,
)
def test_what_is_not_one_prompt_to_hand_over_goes_to_decode_alone(body: dict[str, Any], reason: str) -> None:
    assert undivided_reason(COMPLETIONS, body) == reason


@pytest.mark.parametrize("body", [{"echo": True}, {"n": None}, {"n": 2}, {"logprobs": 5}, {"prompt_logprobs": None}])
def test_usual_parameters_do_not_keep_a_request_from_both_legs(body: dict[str, Any]) -> None:
    assert undivided_reason(COMPLETIONS, A_TEXT | body) is None


@pytest.mark.parametrize(("n", "is_alone"), [(None, False), (1, False), (2, True)])
def test_several_samples_of_a_model_with_states_are_not_handed_over(n: int | None, is_alone: bool) -> None:
    for api, body in ((COMPLETIONS, A_TEXT | {"n": n}), (GENERATE, {"token_ids": [1], "sampling_params": {"n": n}})):
        assert (undivided_reason(api, body, is_cut=True) == "several samples, a model with states") is is_alone


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"n": [3]}, "an invalid number of samples"),
        ({"n": 3}, None),
        ({"echo": True}, "prompt log-probabilities"),
        ({"max_completion_tokens": 0}, "no tokens to generate"),
        ({"logprobs": True, "top_logprobs": 3}, None),
        ({"tools": [{}], "tool_choice": "required"}, None),
    ],
    ids=str,
)
def test_chat_has_its_own_reasons(body: dict[str, Any], reason: str | None) -> None:
    assert undivided_reason(CHAT, A_CHAT | body) == reason
