"""The side of the connector that runs in the engine core, beside vLLM's scheduler."""
