"""Everything that knows vLLM: its configuration, engine core, requests, block pools and kernels.

Only this package and ``pd_connector.connector`` import vLLM. Other packages call functions here and get plain data.
Differences between vLLM releases are behind ``release.VllmRelease``. Importing this package imports nothing else.
"""
