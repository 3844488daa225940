"""Loads vLLM before the tests: what it and its dependencies deprecate of each other is not ours to fail on."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import pd_connector.connector  # noqa: F401
