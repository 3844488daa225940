"""Which request parameters go to which leg. Pure functions over the client's JSON body; no HTTP.

The prefill leg computes the KV cache of the prompt, samples one token and throws it away. Two things must hold:

- Its prompt tokens are those of the decode leg, so whatever can reach the prompt stays as the client sent it. That
  includes every parameter not named below: a chat template or renderer may read what this module has never heard of.
- It ends because its one token is reached (finish reason ``length``): connectors offer the KV cache of no other
  request. So whatever can end it sooner, forbid one token, or change the shape of its answer is taken away.

| parameter | prefill leg | why |
|---|---|---|
| messages, prompt, suffix, model, cache_salt | as sent | they are the prompt and its cache key |
| tools, tool_choice, parallel_tool_calls | as sent | tools are part of the prompt; "none" may drop them (``--exclude-tools-when-tool-choice-none``) and some renderers write the choice into the prompt. A forced choice constrains the one token and does not fail on half a call |
| response_format (chat) | as sent | some renderers write it into the prompt |
| chat_template, chat_template_kwargs, documents, reasoning_effort, add_generation_prompt, continue_final_message, mm_processor_kwargs, media_io_kwargs | as sent | template and renderer input |
| add_special_tokens, truncate_prompt_tokens, truncation_side | as sent | they change the prompt tokens |
| priority, user, session_id, request_id, include_reasoning, ec_transfer_params, vllm_xargs, unknown ones | as sent | scheduling, tracing, extensions |
| max_tokens, max_completion_tokens (chat) | 1 | one token is the least that vLLM computes; the second wins over the first where both are given, so both are set |
| stream, stream_options | false, removed | kv_transfer_params come in a whole answer only; stream_options without stream is an error |
| n, best_of | 1, removed | one sample |
| min_tokens | removed | more than max_tokens is an error |
| stop, stop_token_ids, include_stop_str_in_output, repetition_detection | removed | they could end it with another finish reason |
| ignore_eos | true | a first token that ends the text would end it with finish reason ``stop`` |
| temperature | 0 | the cheapest sampling |
| top_p, top_k, min_p, seed, penalties, logit_bias, allowed_token_ids, bad_words, length_penalty, watermarking | removed | they shape a token that nobody reads |
| structured_outputs; response_format (completions) | removed | no grammar needs to be compiled for it; they never reach the prompt |
| thinking_token_budget, trace_decode_token_ids | removed | they shape output only |
| logprobs, top_logprobs, logprob_token_ids, return_*, routed_experts_prompt_start, stream_interval, output_mode, echo, skip_special_tokens, spaces_between_special_tokens | removed | they shape the answer only; P may lack the tokenizer (``--tokens-only``) or the release that an output_mode needs |
| kv_transfer_params | asks for the transfer | a client's own is dropped on both legs: it could make D read from a host of the client's choice. So is one in vllm_xargs, which vLLM (0.23 to 0.33) copies to where it looks for them, and one in sampling_params.extra_args of /inference/v1/generate; there is no other way by which it takes them. Forms with `vllm_xargs` are refused |

The table is of completions and chat completions; ``apis`` has what other APIs call by other names.

The decode leg gets the client's body, with ``kv_transfer_params`` from the prefill leg, or with those that follow it by
its name. Not every request is one prompt
whose KV cache D can take over; ``undivided_reason`` names the others, which D computes by itself:

- A prompt that is cut to what the output leaves of the context (``truncate_prompt_tokens`` -1; ``truncation`` of
  responses): until 0.31, vLLM would cut P's prompt, which has an output of one token, elsewhere.
- Embeddings for a prompt: ``kv_transfer_params`` belong to one prompt of tokens. Several prompts, unless all are texts
  or all are token ids and nothing else is against it: then each is a request of its own (``several``).
- Beam search: vLLM leaves ``kv_transfer_params`` out of the requests that it makes of the beams.
- Log-probabilities of the prompt (``prompt_logprobs``; ``echo`` with logprobs): they come from computing the prompt, so
  vLLM takes no cached or transferred KV for such a request. In chat, ``echo`` alone already asks for them.
- No tokens to generate (``max_tokens`` 0): there is nothing to decode.

Several choices (``n``) take both legs, and P computes one token for all of them. vLLM runs each as a request of its own
on D, with a copy of the same ``kv_transfer_params``: the connector pulls for the first and lets the others follow it.
Of a model with states, each of the others would be computed all the same, so that D serves such a request alone.
"""  # noqa: E501  the table's rows

from pd_proxy.apis import CUT, Api, Body

_TRANSFER = "kv_transfer_params"

#: What asks a prefill server to keep the KV cache for another engine. Routers agree on these keys.
REMOTE_DECODE: Body = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)

_REMOVED = frozenset({
    # the number and the end of the output
    "stream_options", "best_of", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output",
    "repetition_detection",
    # what is sampled
    "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty",
    "logit_bias", "allowed_token_ids", "bad_words", "watermarking", "structured_outputs", "thinking_token_budget",
    "trace_decode_token_ids",
    # the shape of the answer
    "echo", "logprobs", "top_logprobs", "logprob_token_ids", "return_token_ids", "return_tokens_as_token_ids",
    "return_token_offsets", "return_prompt_text", "routed_experts_prompt_start", "skip_special_tokens",
    "spaces_between_special_tokens", "stream_interval", "output_mode",
})  # fmt: skip
#: Which, if a request has none, a server takes from its model: what is harmless there need not be its default.
_DEFAULTED = frozenset({"presence_penalty", "frequency_penalty", "repetition_penalty", "skip_special_tokens"})


def prefill_body(api: Api, body: Body, transfer_id: str | None = None, *, used: bool = False) -> Body:
    """Return the prefill leg's body: the same prompt, one token, and the wish to hand over the KV cache.

    Args:
        api: of the request.
        body: of the client.
        transfer_id: by which a decode server asks for the KV cache; None if it is told afterwards.
        used: whether the one token is for the client, so that it may end the text where the client's request lets it,
            and is sampled as the client's request says.
    """
    removed = _REMOVED - (_DEFAULTED if used else frozenset()) | api.dropped(body)
    kept = {name: value for name, value in without_transfer(api, body).items() if name not in removed}
    forced = {name: value for name, value in api.one_token.items() if not (used and name == "ignore_eos")}
    sampling = {name: value for name, value in api.parameters(kept).items() if name not in removed} | forced
    named = {} if transfer_id is None else {"transfer_id": transfer_id}
    shaped = kept | {api.sampling: sampling} if api.sampling else sampling
    ids = {"return_token_ids": True} if used else {}
    return shaped | {"stream": False, _TRANSFER: REMOTE_DECODE | named} | ids


def following(transfer_id: str, host: str, port: int) -> Body:
    """Return the ``kv_transfer_params`` of a decode leg that is sent together with its prefill leg.

    Args:
        transfer_id: that the prefill leg has.
        host: of the prefill server's control channel.
        port: of the same.
    """
    named = {"transfer_id": transfer_id, "remote_host": host, "remote_port": port}
    return {"do_remote_prefill": True, "do_remote_decode": False} | named


def decode_body(api: Api, body: Body, transfer: Body | None) -> Body:
    """The decode leg's body. Without ``transfer`` D computes the prompt itself."""
    kept = without_transfer(api, body)
    return kept if transfer is None else kept | {_TRANSFER: transfer}


def without_transfer(api: Api | None, body: Body) -> Body:
    """Return a client's body without ``kv_transfer_params``, wherever vLLM would take them from."""
    kept = {name: value for name, value in body.items() if name != _TRANSFER}
    _drop_from(kept, "vllm_xargs")
    if api is not None and api.sampling and isinstance(sampling := kept.get(api.sampling), dict):
        kept[api.sampling] = sampling = dict(sampling)
        _drop_from(sampling, "extra_args")
    return kept


def undivided_reason(api: Api, body: Body, *, is_cut: bool = False) -> str | None:
    """Why a request goes to D alone, or None where it takes both legs.

    Values of a wrong type count as unusual: D alone judges them. ``is_cut``: P leaves the prompt's last token to D.
    """
    reason = api.undivided(body)
    if reason is not None:
        return reason
    if body.get("truncate_prompt_tokens") == -1:
        return CUT
    parameters = api.parameters(body)
    return _number_reason(parameters.get("n"), is_cut=is_cut) or _sampling_reason(parameters, chat=api.is_chat)


def _number_reason(n: object, *, is_cut: bool) -> str | None:
    if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
        return "an invalid number of samples"
    return "several samples, a model with states" if is_cut and n not in (None, 1) else None


def _sampling_reason(parameters: Body, *, chat: bool) -> str | None:
    if parameters.get("use_beam_search"):
        return "beam search"
    if _wants_prompt_logprobs(parameters, chat=chat):
        return "prompt log-probabilities"
    if parameters.get("skip_reading_prefix_cache"):
        return "a prompt that reads no cache"
    if 0 in (parameters.get(limit) for limit in ("max_tokens", "max_completion_tokens", "max_output_tokens")):
        return "no tokens to generate"
    return None


def _drop_from(body: Body, member: str) -> None:
    extra = body.get(member)
    if isinstance(extra, dict) and _TRANSFER in extra:
        body[member] = {name: value for name, value in extra.items() if name != _TRANSFER}


def _wants_prompt_logprobs(parameters: Body, *, chat: bool) -> bool:
    if any(parameters.get(name) is not None for name in ("prompt_logprobs", "prompt_logprob_token_ids")):
        return True
    return bool(parameters.get("echo")) and (chat or parameters.get("logprobs") is not None)
