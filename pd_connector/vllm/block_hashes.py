"""How vLLM names the contents of blocks, so that two engines can tell whether they hold the same tokens.

A hash is of a block's tokens, of all before them, and of what else shapes them (adapter, images, salt). Engines make
the same hashes of the same tokens if they were started with one hash function, and with one seed: vLLM 0.23 draws one
at every start unless PYTHONHASHSEED is set, and later releases do so for xxhash.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from transfer.control.limits import MAX_HASHES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request

#: Tokens whose hash shows how an engine makes hashes.
_PROBE = tuple(range(16))


class BlockHashes:
    """Makes the hashes of requests' prompts. Belongs to the scheduler's thread."""

    def __init__(self, vllm_config: "VllmConfig") -> None:
        """Make none yet: vLLM chooses its seed after its connectors have started."""
        self._vllm_config = vllm_config

    @cached_property
    def hashing(self) -> str:
        """How this engine makes hashes: two engines with equal ones name equal tokens alike."""
        from vllm.v1.core.kv_cache_utils import hash_block_tokens  # noqa: PLC0415  imports most of vLLM

        algorithm = self._vllm_config.cache_config.prefix_caching_hash_algo
        return f"{algorithm}:{hash_block_tokens(self._function, None, _PROBE, None).hex()[:32]}"

    def of_prompt(self, request: "Request", hash_tokens: int, own_tokens: int) -> "Sequence[BlockHash]":
        """Return the hashes of a prompt's full blocks of ``hash_tokens`` tokens, no more than may be asked for.

        ``own_tokens``: of which vLLM has made hashes here, which need not be made again.
        """
        full = min(request.num_prompt_tokens // hash_tokens, MAX_HASHES)
        if hash_tokens == own_tokens:
            made: Sequence[BlockHash] = request.block_hashes[:full]
            return made
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher  # noqa: PLC0415  as above

        hashes: Sequence[BlockHash] = get_request_block_hasher(hash_tokens, self._function)(
            _Unhashed(request, full * hash_tokens)
        )
        return hashes

    @cached_property
    def _function(self) -> Any:
        from vllm.utils.hashing import get_hash_fn_by_name  # noqa: PLC0415  as above

        return get_hash_fn_by_name(self._vllm_config.cache_config.prefix_caching_hash_algo)


class _Unhashed:
    """A request as vLLM's hasher sees it before it has hashed any of its blocks, as if no more tokens followed."""

    def __init__(self, request: "Request", num_tokens: int) -> None:
        self._request, self.num_tokens = request, num_tokens
        self.block_hashes: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
