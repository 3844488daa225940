"""The side of the connector that runs in the engine core, beside vLLM's scheduler.

``scheduler`` passes vLLM's calls to a list of roles. Those of prefill engines are in ``prefill``, those of decode
engines in ``decode``; both use ``host``, the host memory.
"""
