"""vLLM's NPU platform: KV caches that keep all layers of a block together, and the check that operators take them."""
