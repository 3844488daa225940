"""The ctypes mirror of ACL's interface against the headers in torch_npu's wheel, by the compiler."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from transfer.copies.batch import acl_abi as abi

STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "aclrtMemLocation": abi.AclMemLocation,
    "aclrtMemcpyBatchAttr": abi.MemcpyBatchAttr,
}

CONSTANTS = {
    "ACL_MEMCPY_HOST_TO_DEVICE": abi.MEMCPY_HOST_TO_DEVICE,
    "ACL_MEMCPY_DEVICE_TO_HOST": abi.MEMCPY_DEVICE_TO_HOST,
    "ACL_MEM_LOCATION_TYPE_HOST": abi.LOCATION_HOST,
    "ACL_MEM_LOCATION_TYPE_DEVICE": abi.LOCATION_DEVICE,
    "ACL_ERROR_RT_FEATURE_NOT_SUPPORT": abi.FEATURE_NOT_SUPPORT,
}

_BATCH = "void **, size_t *, void **, size_t *, size_t, aclrtMemcpyBatchAttr *, size_t *, size_t"
#: What the headers declare, or may lack of what the runtime has: result and parameters.
DECLARATIONS = {
    "aclrtMemcpyBatchAsync": ("int", f"{_BATCH}, size_t *, aclrtStream"),
    "aclrtMemcpyBatchAsyncV2": ("int", f"{_BATCH}, aclrtStream"),
    "aclrtMemcpyAsync": ("int", "void *, size_t, const void *, size_t, aclrtMemcpyKind, aclrtStream"),
    "aclrtMallocHost": ("int", "void **, size_t"),
    "aclrtFreeHost": ("int", "void *"),
    "aclrtDeviceGetPCIBusId": ("int", "int32_t, char *, int32_t"),
    "aclrtSetDevice": ("int", "int32_t"),
    "aclGetRecentErrMsg": ("const char *", ""),
}


def _structures() -> Iterator[str]:
    for name, mirror in STRUCTURES.items():
        yield f"sizeof({name}) == {ctypes.sizeof(mirror)}"
        for field, *_ in mirror._fields_:
            mirrored = getattr(mirror, field)
            yield f"offsetof({name}, {field}) == {mirrored.offset}"
            yield f"sizeof((({name} *)0)->{field}) == {mirrored.size}"


def _functions() -> Iterator[str]:
    for name, (result, parameters) in DECLARATIONS.items():
        argument_types, result_type = abi.PROTOTYPES[name]
        yield f"__builtin_types_compatible_p(__typeof__(&{name}), {result} (*)({parameters}))"
        yield f"sizeof({result}) == {ctypes.sizeof(result_type)}"
        declared = [parameter for parameter in parameters.split(", ") if parameter]
        assert len(declared) == len(argument_types), name
        for parameter, argument_type in zip(declared, argument_types, strict=True):
            yield f"sizeof({parameter}) == {ctypes.sizeof(argument_type)}"


def compile_assertions(folder: Path, assertions: list[str], main: str = "") -> subprocess.CompletedProcess[str]:
    compiler = shutil.which(os.environ.get("CC", "gcc"))
    assert compiler is not None
    source = folder / "abi.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdint.h>\n#include <acl/acl.h>\n#include <acl/error_codes/rt_error_codes.h>\n"
        "aclError aclrtDeviceGetPCIBusId(int32_t, char *, int32_t);\n"
        + "".join(f'_Static_assert({text}, "");\n' for text in assertions)
        + f"int main(void) {{ {main} return 0; }}\n"
    )
    package = find_spec("torch_npu")
    assert package is not None
    assert package.origin is not None
    headers = Path(package.origin).parent / "include"
    return subprocess.run(
        [compiler, "-w", f"-I{headers}", str(source), "-o", str(folder / "abi")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_structures_constants_and_prototypes_are_the_headers(tmp_path: Path) -> None:
    assert set(DECLARATIONS) == set(abi.PROTOTYPES)
    assertions = [*_structures(), *_functions(), *(f"{name} == {value}" for name, value in CONSTANTS.items())]
    done = compile_assertions(tmp_path, assertions)
    assert done.returncode == 0, done.stderr


def test_error_names_are_the_headers(tmp_path: Path) -> None:
    # Not static assertions: some of the names are constants of C, and not of its compiler.
    main = " ".join(f"if ({name} != {code}) return 1;" for code, (name, _) in abi.ERRORS.items())
    done = compile_assertions(tmp_path, [], main)
    assert done.returncode == 0, done.stderr
    assert subprocess.run([tmp_path / "abi"], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    "wrong",
    [
        "offsetof(aclrtMemcpyBatchAttr, srcLoc) == 0",
        "ACL_MEMCPY_DEVICE_TO_HOST == 1",
        "__builtin_types_compatible_p(__typeof__(&aclrtFreeHost), int (*)(void **))",
    ],
)
def test_a_wrong_mirror_does_not_compile(tmp_path: Path, wrong: str) -> None:
    assert "static assertion failed" in compile_assertions(tmp_path, [wrong]).stderr
