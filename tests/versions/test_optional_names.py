"""What the code asks of vLLM's objects only if they have it: by a wrong name, it would take a default and not fail.

``names.json`` does not tell of these: nobody knows which objects they are. So each is looked for as a word in the
sources of the installed vLLM.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import vllm.version

from tests.support.releases import since
from tests.support.sources import modules, source_tree

#: Where vLLM has what the code asks for.
SEARCHED = (
    "config", "distributed/kv_events.py", "distributed/kv_transfer", "envs.py", "inputs", "model_executor/layers",
    "multimodal", "v1",
)  # fmt: skip

#: What need not be in these, and why.
ABSENT = {
    "wrapped_by_pd_connector": "ours",
    "_GLOBAL_STREAM": "vllm-ascend's",
    "cache_sparse_sfa_c8": "vllm-ascend's",
    "sfa_dcp_replicated_indexer_size": "vllm-ascend's",
    "stream_ranges": "of a model's layers",
    "calculate_kv_scales": "of vLLM 0.23",
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "until vLLM 0.32",
    "restore_kv_caches": "since vLLM 0.33",
}

#: What is asked of other releases, or of vllm-ascend only.
_OF_OTHERS = re.compile(r"\.(npu|ascend_options|release_\d+)(\.|$)")


def asked() -> Iterator[tuple[str, str]]:
    """Each name that is asked for by ``getattr`` or ``hasattr``, and the module that asks."""
    for module in modules("pd_connector.vllm"):
        if not _OF_OTHERS.search(module):
            for node in ast.walk(source_tree(module)):
                match node:
                    case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
                        yield name, module


@since((0, 32), "all that is asked of the newest releases")
def test_vllm_has_what_it_is_asked_for() -> None:
    package = Path(vllm.version.__file__).parent
    files = [file for place in SEARCHED for file in sorted((package / place).rglob("*.py")) or [package / place]]
    words = {word for file in files for word in re.findall(r"\w+", file.read_text())}
    assert {name: module for name, module in asked() if name not in words | ABSENT.keys()} == {}


def test_every_exception_is_one() -> None:
    assert ABSENT.keys() <= dict(asked()).keys()
