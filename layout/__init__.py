"""Where KV cache bytes are: geometry of paged caches and the planning of copies between them.

Nothing here moves bytes, opens sockets or knows vLLM.
"""
