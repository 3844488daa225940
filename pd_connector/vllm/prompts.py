"""What a request's prompt is, so that both engines can tell whether they mean the same: tokens, adapter, images.

Digests of adapters are taken when vLLM loads them, or with the first request that names one: what is in an adapter's
directory later is not what vLLM computes with.
"""

import hashlib
import json
import logging
import os
from typing import TYPE_CHECKING, Any

from pd_connector.params import PromptIdentity, prompt_digest
from pd_connector.tensor_files import model_directory, tensors_digest, weight_files
from pd_connector.vllm.requests import answer_with, leave_last_token
from transfer.control.limits import LastFew

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_MOST_ADAPTERS = 4096  # more than are in use
_MOST_NAMES = 1 << 16  # who loads another adapter under a name that is forgotten may find blocks of the old one
#: Columns of an embedded prompt that are hashed, of each token.
_EMBEDDED = 32
#: What of an adapter's configuration vLLM computes with.
_ADAPTER_KEYS = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")


class Prompts:
    """Identifies the prompts of an engine's requests. Belongs to the scheduler's thread."""

    def __init__(self, vllm_config: "VllmConfig | None" = None, model_check: str = "config") -> None:
        """Know no adapter yet.

        Args:
            vllm_config: of the engine; None if its requests have no images.
            model_check: the setting; adapters are compared by what they hold if it is "weights".
        """
        self._hashing = _media_hashing(vllm_config)
        self._reads_adapters = model_check == "weights"
        self._adapters: LastFew[int, str] = LastFew(_MOST_ADAPTERS)  # digests, by vLLM's number of the adapter
        #: vLLM's number and the path of each adapter, by name.
        self._places: LastFew[str, tuple[int, str]] = LastFew(_MOST_NAMES)
        self._whole: dict[str, PromptIdentity] = {}  # of requests whose prompts were cut, by request

    def identify(self, request: "Request") -> PromptIdentity:
        """Return what tells a request's prompt from others. Reads an adapter's files if no request has named it yet.

        Of a prompt that was cut, the whole prompt counts.
        """
        if (whole := self._whole.get(request.request_id)) is not None:
            return whole
        adapter: LoRARequest | None = request.lora_request
        extra = _adapter_name(request)
        if (embedded := getattr(request, "prompt_embeds", None)) is not None:
            extra = (*extra, f"embeds:{_embeddings_digest(embedded)}")
        return PromptIdentity(
            tokens=request.num_prompt_tokens,
            digest=prompt_digest(request.prompt_token_ids, extra),
            adapter=str(adapter.lora_name) if adapter is not None else "",
            adapter_digest=self._adapter_digest(adapter) if adapter is not None else "",
            media_digest=self._media_digest(request),
        )

    def continues(self, request: "Request", earlier: PromptIdentity | None) -> bool:
        """Return whether a request's prompt begins with an earlier one and goes on. False if either has embeddings."""
        if earlier is None or not earlier.digest or not request.prompt_token_ids:
            return False
        if request.num_prompt_tokens <= earlier.tokens:  # another choice (``n``) of the same request, mostly
            return False
        return prompt_digest(request.prompt_token_ids[: earlier.tokens], _adapter_name(request)) == earlier.digest

    def cut(self, request: "Request", hash_tokens: int, *, drafts: bool = False) -> None:
        """Leave the last token of a prompt to the engine that decodes, if possible; see ``leave_last_token``.

        Args:
            request: the request, which has just come.
            hash_tokens: tokens of the blocks that vLLM hashes.
            drafts: layers that draft have rows of the prompt, each made of a token and of the one behind it. Behind the
                last one that is left, they see what is sampled: that is to be the token that was taken off. Not where a
                grammar may forbid it: vLLM ends a request whose grammar rejects a token.
        """
        whole, last = self.identify(request), int(request.all_token_ids[-1])
        if leave_last_token(request, hash_tokens):
            self._whole[request.request_id] = whole
            if drafts and request.prompt_embeds is None and not request.use_structured_output:
                answer_with(request, last)

    def is_cut(self, request_id: str) -> bool:
        """Return whether a request computes all tokens of its prompt but the last."""
        return request_id in self._whole

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._whole.pop(request_id, None)

    def loaded(self, adapter: "LoRARequest") -> bool:
        """Note that vLLM has loaded an adapter right now; return whether in the place of another of its name.

        vLLM gives one that was unloaded before a new number. Without ``load_inplace``, it keeps what it has loaded of a
        number before.
        """
        place = (adapter.lora_int_id, adapter.lora_path)
        replaces = self._places.get(adapter.lora_name, place) != place
        if adapter.load_inplace and self._adapters.pop(adapter.lora_int_id, None) is not None:
            replaces = True
        self._places[adapter.lora_name] = place
        self._adapter_digest(adapter)
        return replaces

    def _adapter_digest(self, adapter: "LoRARequest") -> str:
        """Return the digest of what an adapter held when it was first seen; empty if unknown, or not to be compared."""
        name, number = adapter.lora_name, adapter.lora_int_id
        self._places[name] = self._places.get(name, (number, adapter.lora_path))
        known = self._adapters.get(number)
        if known is None:
            known = _adapter_digest(adapter.lora_path) if self._reads_adapters else ""
        self._adapters[number] = known
        return known

    def _media_digest(self, request: "Request") -> str:
        """Return what tells the images, sounds and videos of a prompt from others; empty if it has none, or cannot.

        Before the colon is how vLLM hashes them on this engine: elsewhere, the same may have another hash.
        """
        if not (self._hashing and request.mm_features):
            return ""
        features = [
            (each.modality, each.identifier, each.mm_position.offset, each.mm_position.length)
            for each in request.mm_features
        ]
        return f"{self._hashing}:{_digest(features)}"


def _adapter_name(request: "Request") -> tuple[str, ...]:
    """Return what a prompt's digest has of its LoRA adapter."""
    return () if request.lora_request is None else (f"lora:{request.lora_request.lora_name}",)


def _media_hashing(vllm_config: "VllmConfig | None") -> str:
    """Return a digest of how vLLM names what is no text in a prompt; empty if the names do not tell the contents."""
    model: Any = getattr(vllm_config, "model_config", None)
    media = getattr(model, "multimodal_config", None)
    if vllm_config is None or media is None:
        return ""
    if not (media.mm_processor_cache_gb or vllm_config.cache_config.enable_prefix_caching):
        return ""  # vLLM then numbers them
    from vllm.version import __version__  # noqa: PLC0415  only for models that have such prompts

    algorithm = getattr(media, "mm_hasher_algorithm", os.environ.get("VLLM_MM_HASHER_ALGORITHM", ""))
    return _digest([__version__, model.model, str(algorithm)])


def _adapter_digest(path: str) -> str:
    """Return a digest of an adapter's tensors and of how they are to be applied; empty if there are no safetensors."""
    try:
        directory = model_directory(path)
        tensors = tensors_digest(weight_files(directory)) if directory is not None else ""
        if directory is None or not tensors:
            return ""
        file = directory / "adapter_config.json"
        config = json.loads(file.read_bytes()) if file.is_file() else {}
        return _digest([tensors, {key: config.get(key) for key in _ADAPTER_KEYS}])
    except OSError as error:  # of a request, it would end the engine
        logger.warning("PDConnector: the adapter at %s is not compared with those of other engines: %s", path, error)
        return ""


def _embeddings_digest(embedded: Any) -> str:
    """Return a digest of a part of each token's embedding. ``embedded``: a tensor of shape [tokens, hidden size]."""
    part = embedded[:, :_EMBEDDED].float().contiguous().cpu().numpy()
    return hashlib.blake2b(part.tobytes(), digest_size=8).hexdigest()


def _digest(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()
