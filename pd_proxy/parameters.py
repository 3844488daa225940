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
| thinking_token_budget | removed | it shapes output only |
| logprobs, top_logprobs, logprob_token_ids, return_*, routed_experts_prompt_start, stream_interval, echo, skip_special_tokens, spaces_between_special_tokens | removed | they shape the answer only |
| kv_transfer_params | asks for the transfer | a client's own is dropped on both legs: it could make D read from a host of the client's choice. So is one in vllm_xargs, which vLLM (0.23 to 0.33) copies to where it looks for them; there is no third way by which its completions take them |

The decode leg gets the client's body, with ``kv_transfer_params`` from the prefill leg, or with those that follow it by
its name. Not every request is one prompt
whose KV cache D can take over; ``undivided_reason`` names the others, which D computes by itself:

- Several prompts, or embeddings for a prompt: one ``kv_transfer_params`` belongs to one prompt of tokens.
- Beam search: vLLM leaves ``kv_transfer_params`` out of the requests that it makes of the beams.
- Log-probabilities of the prompt (``prompt_logprobs``; ``echo`` with logprobs): they come from computing the prompt, so
  vLLM takes no cached or transferred KV for such a request. In chat, ``echo`` alone already asks for them.
- No tokens to generate (``max_tokens`` 0): there is nothing to decode.

Several choices (``n``) take both legs, and P computes one token for all of them. vLLM runs each as a request of its own
on D, with a copy of the same ``kv_transfer_params``: the connector pulls for the first and lets the others follow it.
"""  # noqa: E501  the table's rows

from typing import Any

Body = dict[str, Any]

_TRANSFER = "kv_transfer_params"

#: What asks a prefill server to keep the KV cache for another engine. Routers agree on these keys.
REMOTE_DECODE: Body = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

_REMOVED = frozenset(
    {
        # the number and the end of the output
        "stream_options",
        "best_of",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "repetition_detection",
        # what is sampled
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "length_penalty",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "watermarking",
        "structured_outputs",
        "thinking_token_budget",
        # the shape of the answer
        "echo",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "return_token_offsets",
        "return_prompt_text",
        "routed_experts_prompt_start",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stream_interval",
    }
)


def prefill_body(body: Body, transfer_id: str | None = None, *, chat: bool, used: bool = False) -> Body:
    """Return the prefill leg's body: the same prompt, one token, and the wish to hand over the KV cache.

    Args:
        body: of the client.
        transfer_id: by which a decode server asks for the KV cache; None if it is told afterwards.
        chat: whether the body is of a chat completion.
        used: whether the one token is for the client, so that it may end the text where the client's request lets it.
    """
    removed = _REMOVED if chat else _REMOVED | {"response_format"}
    kept = {name: value for name, value in without_transfer(body).items() if name not in removed}
    one_token: Body = {"max_tokens": 1, "n": 1, "stream": False, "ignore_eos": True, "temperature": 0.0}
    if chat:
        one_token["max_completion_tokens"] = 1
    if used:
        del one_token["ignore_eos"]
    named = {} if transfer_id is None else {"transfer_id": transfer_id}
    return kept | one_token | {_TRANSFER: REMOTE_DECODE | named}


def following(transfer_id: str, host: str, port: int) -> Body:
    """Return the ``kv_transfer_params`` of a decode leg that is sent together with its prefill leg.

    Args:
        transfer_id: that the prefill leg has.
        host: of the prefill server's control channel.
        port: of the same.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer_id,
        "remote_host": host,
        "remote_port": port,
    }


def decode_body(body: Body, transfer: Body | None) -> Body:
    """The decode leg's body. Without ``transfer`` D computes the prompt itself."""
    kept = without_transfer(body)
    return kept if transfer is None else kept | {_TRANSFER: transfer}


def without_transfer(body: Body) -> Body:
    """Return a client's body without ``kv_transfer_params``, wherever vLLM would take them from."""
    kept = {name: value for name, value in body.items() if name != _TRANSFER}
    extra = kept.get("vllm_xargs")
    if isinstance(extra, dict) and _TRANSFER in extra:
        kept["vllm_xargs"] = {name: value for name, value in extra.items() if name != _TRANSFER}
    return kept


def undivided_reason(body: Body, *, chat: bool) -> str | None:
    """Why a request goes to D alone, or None where it takes both legs.

    Values of a wrong type count as unusual: D alone judges them.
    """
    reason = None if chat else _prompt_reason(body)
    if reason is not None:
        return reason
    if not _is_number_of_choices(body.get("n")):
        return "an invalid number of samples"
    if body.get("use_beam_search"):
        return "beam search"
    if _wants_prompt_logprobs(body, chat=chat):
        return "prompt log-probabilities"
    if 0 in (body.get("max_tokens"), body.get("max_completion_tokens")):
        return "no tokens to generate"
    return None


def _is_number_of_choices(n: object) -> bool:
    return n is None or (isinstance(n, int) and not isinstance(n, bool) and n >= 1)


def _prompt_reason(body: Body) -> str | None:
    if body.get("prompt_embeds"):
        return "prompt embeddings"
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) != 1 and not all(isinstance(item, int) for item in prompt):
        return "several prompts"
    return None


def _wants_prompt_logprobs(body: Body, *, chat: bool) -> bool:
    if body.get("prompt_logprobs") is not None:
        return True
    return bool(body.get("echo")) and (chat or body.get("logprobs") is not None)
