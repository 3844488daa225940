"""Another generation of devices than the one that vllm-ascend was built for here.

Run as a program, an API server as on devices that know fp8 (A5): ``python -m tests.support.ascend.device_generation``.
"""

import runpy
import sys
import types

_BUILD = "vllm_ascend._build_info"
#: What torch_npu calls a device of that generation.
_A5 = 260


def build_for(generation: str) -> None:
    """Let vllm-ascend, which this process and its forks have not imported yet, be built for "A2", "A3" or "A5".

    Its build notes that in a module, whose place another takes here.
    """
    build = sys.modules[_BUILD] = types.ModuleType(_BUILD)
    vars(build)["__device_type__"] = generation


def main() -> None:
    """Serve what the command line says."""
    import torch_npu  # noqa: PLC0415  those who only build engines ask for none of its devices

    build_for("A5")
    torch_npu.npu.get_soc_version = lambda: _A5
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
