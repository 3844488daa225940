"""Loads vLLM before the tests, whose simulator asks the connector's scheduler side."""

import importlib
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM and its dependencies deprecate of each other is not ours to fail on
    importlib.import_module("vllm.v1.core.sched.scheduler")
