"""vLLM's CPU platform: KV cache layouts, the check that kernels support them, and the order inside a block."""
