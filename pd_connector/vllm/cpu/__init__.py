"""vLLM's CPU platform: layouts of its KV caches, the proof that kernels accept them, the order inside a block."""
