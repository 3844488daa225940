"""Lets PyTorch's CUDA build import without NVIDIA's packages: makes stand-ins for the libraries that it is linked with.

PyPI has only the CUDA build of torch 2.10 for x86-64, and the CUDA libraries that it is linked with take 4.4 GB. Each
of them that is missing gets a stand-in of the same name, which defines what torch's libraries take from it: functions
that answer that there is no device. Needs gcc and binutils.
"""

import re
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

#: Present on every machine: these are not replaced.
_SYSTEM = re.compile(r"^(ld-linux|lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s|gomp|atomic|util|numa)\.so)")
#: The driver: torch only loads what is linked with it once it needs it.
_DRIVER = "libcuda.so.1"
#: How functions of CUDA's libraries are named that carry no version.
_CUDA_NAME = re.compile(r"^(cu|nccl|nvshmem|nvrtc|nvml)[A-Za-z]")
_NO_DEVICE = 100  # cudaErrorNoDevice
#: What PyTorch calls, or prints, although there is no device.
_BODIES = {
    "cudaGetErrorString": 'const char *cudaGetErrorString(int error) { return "no CUDA here: a stand-in"; }\n',
    "cudaGetErrorName": 'const char *cudaGetErrorName(int error) { return "cudaErrorNoDevice"; }\n',
    "cudaStreamIsCapturing": "int cudaStreamIsCapturing(void *stream, int *status) { return *status = 0; }\n",
    "cudaGetDeviceCount": f"int cudaGetDeviceCount(int *count) {{ *count = 0; return {_NO_DEVICE}; }}\n",
}


@dataclass
class _Linkage:
    """What some libraries need, define and lack. A symbol's version is "" if it has none."""

    missing: set[str] = field(default_factory=set)  # libraries
    defined: set[str] = field(default_factory=set)  # symbols
    undefined: dict[str, str] = field(default_factory=dict)  # symbol: version
    owners: dict[str, str] = field(default_factory=dict)  # version: the library that it is expected in

    @classmethod
    def of(cls, libraries: list[Path]) -> "_Linkage":
        found = cls()
        present = {path.name for path in libraries} | {_DRIVER}
        for path in libraries:
            needed = re.findall(r"\(NEEDED\).*\[(.*)\]", _run("readelf", "-dW", str(path)))
            found.missing |= {name for name in set(needed) - present if not _SYSTEM.match(name)}
            found._read_versions(path)
            found._read_symbols(path)
        return found

    def wanted(self) -> dict[str, dict[str, list[str]]]:
        """The symbols to define, by library and version."""
        # A symbol without a version may be any of these libraries', and one definition is enough: the first has them.
        first = min(self.missing)
        wanted: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for symbol, version in self.undefined.items():
            if symbol in self.defined:
                continue
            if version and self.owners.get(version) in self.missing:
                wanted[self.owners[version]][version].append(symbol)
            elif not version and _CUDA_NAME.match(symbol):
                wanted[first][""].append(symbol)
        return wanted

    def _read_versions(self, library: Path) -> None:
        file = ""
        for line in _run("readelf", "-VW", str(library)).splitlines():
            if found := re.search(r"File: (\S+)", line):
                file = found[1]
            elif found := re.search(r"Name: (\S+)\s+Flags", line):
                self.owners[found[1]] = file

    def _read_symbols(self, library: Path) -> None:
        for line in _run("nm", "-D", str(library)).splitlines():
            kind, name = line.split()[-2:]
            symbol, _, version = name.partition("@")
            if kind in "Uwv":
                self.undefined[symbol] = version.lstrip("@")
            else:
                self.defined.add(symbol)


def build_cuda_stubs(torch_libraries: Path, out: Path) -> None:
    """Make stand-ins in ``out`` for what the libraries in ``torch_libraries`` lack."""
    linkage = _Linkage.of(sorted(torch_libraries.glob("*.so*")))
    out.mkdir(parents=True, exist_ok=True)
    if not linkage.missing:
        return
    wanted = linkage.wanted()
    for name in sorted(linkage.missing):
        _compile(out / name, wanted.get(name, {}))


def _compile(library: Path, symbols: dict[str, list[str]]) -> None:
    default = f"long {{}}(void) {{{{ return {_NO_DEVICE}; }}}}\n"
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder) / "stub.c", Path(folder) / "versions"
        names = [symbol for group in symbols.values() for symbol in group]
        source.write_text("".join(_BODIES.get(name, default.format(name)) for name in names))
        script.write_text("".join(f"{version} {{ global: *; }};\n" for version in symbols if version))
        options = [f"-Wl,--version-script={script}"] if any(symbols) else []
        _run(
            "gcc", "-shared", "-fPIC", "-w", "-fno-builtin", str(source), "-o", str(library),
            f"-Wl,-soname,{library.name}", *options,
        )  # fmt: skip


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
