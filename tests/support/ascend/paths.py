"""Where things are in the environment that ``environment`` makes; for the Python of that environment."""

import sys
from pathlib import Path

ROOT_OF_PROJECT = Path(__file__).parents[3]


def ascend_release() -> str:
    """The release that the running Python's environment was made for, "0.30" or "0.23"; "" if it is none of ours."""
    stamp = Path(sys.prefix) / "ascend-release"
    return stamp.read_text().strip() if stamp.exists() else ""


def cuda_stubs_directory(prefix: Path = Path(sys.prefix)) -> Path:
    """Stand-ins for CUDA's libraries."""
    return prefix / "cuda-stubs"


def mooncake_npu_directory(prefix: Path = Path(sys.prefix)) -> Path:
    """Mooncake's wheel for NPUs, apart from the one that the servers use over TCP."""
    return prefix / "mooncake-npu"


def vllm_cache_directory(prefix: Path = Path(sys.prefix)) -> Path:
    """What this environment's vLLM keeps from one start to the next."""
    return prefix / "vllm-cache"


def kernel_directory(prefix: Path = Path(sys.prefix)) -> Path:
    """The compiled host kernels, and the schemas of vllm-ascend's operators."""
    return prefix / "host-kernels"


def kernel_library() -> Path:
    """The compiled module of the host kernels."""
    return kernel_directory() / "host_kernels.so"


def recipe_proxy(prefix: Path = Path(sys.prefix)) -> Path:
    """The proxy of vllm-ascend's recipes, one of its examples."""
    return prefix / "load_balance_proxy_server_example.py"


def operator_schemas(prefix: Path = Path(sys.prefix)) -> Path:
    """The schemas of vllm-ascend's own operators, one a line."""
    return kernel_directory(prefix) / "operators.txt"
