"""vLLM 0.32: where it differs from 0.33."""

from pd_connector.vllm.releases.newest import VllmRelease


class Release032(VllmRelease):
    """vLLM 0.32. A block of DeepSeek V4.1 has the values of all tokens first, and scales are float32 on any GPU."""

    keeps_scales_by_token = False

    def scales_indexer_by_mx(self) -> bool:
        """Return whether an FP8 indexer keeps a token's scale as UE8M0 bytes on this device, not as a float32."""
        return False
