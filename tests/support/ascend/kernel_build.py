"""Builds what the environment compiles of this project: the simulated ACL runtime and the host kernels.

Run by the Python of that environment: ``python -m tests.support.ascend.kernel_build``. Does nothing if all is newer
than its sources.
"""

import os
import re
import subprocess
import sysconfig
import tarfile
from importlib.util import find_spec
from pathlib import Path

from tests.support.ascend.paths import cuda_stubs_directory, kernel_library
from tests.support.devices.npu_simulator import acl_headers, runtime_directory

_SOURCES = Path(__file__).parent / "host_kernels" / "native"
_FLAGS = ("-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=host_kernels")


def build_all() -> None:
    """Bring the simulated runtime and the host kernels up to date with their sources."""
    runtime, library = runtime_directory(), kernel_library()
    newest = max(path.stat().st_mtime for path in _SOURCES.iterdir())
    if library.exists() and library.stat().st_mtime > newest:
        return
    library.parent.mkdir(parents=True, exist_ok=True)
    built = library.with_suffix(f".{os.getpid()}")
    subprocess.run([*_command(runtime), "-o", str(built)], check=True)
    built.replace(library)


def library_path() -> str:
    """What LD_LIBRARY_PATH must be for torch and torch_npu to load."""
    return f"{runtime_directory()}:{cuda_stubs_directory()}"


def write_operator_schemas(distribution: Path, out: Path) -> None:
    """Take the schemas of vllm-ascend's own operators out of its source distribution, one a line."""
    with tarfile.open(distribution) as archive:
        (member,) = (m for m in archive.getmembers() if re.fullmatch(r"[^/]+/csrc/torch_binding\.cpp", m.name))
        file = archive.extractfile(member)
        assert file is not None
        source = file.read().decode()
    source = re.sub(r"^\s*//.*$", "", source, flags=re.MULTILINE)
    schemas: dict[str, str] = {}
    for found in re.finditer(r'ops\.def\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)\s*[,)]', source):
        text = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', found[1])).replace('\\"', '"').replace("\\n", " ")
        schema = " ".join(text.split())
        schemas.setdefault(schema.partition("(")[0], schema)
    assert schemas, f"{distribution} defines no operators where they were expected"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(schemas.values()) + "\n")


def _command(runtime: Path) -> list[str]:
    torch, torch_npu = _package("torch"), _package("torch_npu")
    headers = [
        torch / "include",
        torch / "include" / "torch" / "csrc" / "api" / "include",
        torch_npu.parent,
        torch_npu / "include",
        acl_headers(),
        Path(sysconfig.get_paths()["include"]),
    ]
    return [
        *(os.environ.get("CXX", "g++"), *_FLAGS, *(f"-I{path}" for path in headers), str(_SOURCES / "kernels.cpp")),
        *(f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python"),
        *(f"-L{torch_npu / 'lib'}", "-ltorch_npu", f"-L{runtime}", "-lascendcl", "-Wl,--allow-shlib-undefined"),
    ]


def _package(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


if __name__ == "__main__":
    build_all()
