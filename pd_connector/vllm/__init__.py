"""All that knows vLLM: its configuration, engine core, requests, block pools, and its kernels' memory.

Only this package and ``pd_connector.connector`` import vLLM. The other rooms ask the functions here and get plain data.
What differs between vLLM's releases is behind ``release.VllmRelease``. Importing this package imports nothing.
"""
