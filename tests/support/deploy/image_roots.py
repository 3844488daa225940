"""Does what a Dockerfile says in a new Debian root, by chroot: there may be no container engine.

Each command has a mount and a process namespace of its own, as in a container: it is the first process there, and its
mounts and all that it starts end with it. Package registries are reached as this machine reaches them: settings of pip
and apt and proxies are passed to what an instruction runs, and nothing of them stays in the image.
"""

import os
import re
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.support.deploy.dockerfiles import Instruction, build_context, expand
from tests.support.sources import ROOT

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # of an image without one
_PACKAGES = {"debootstrap": "debootstrap", **dict.fromkeys(("setpriv", "unshare", "nsenter"), "util-linux")}
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
#: Where files of this machine that its settings name are found in a root, while an instruction runs.
_MACHINE = "/run/machine"
_APART = ("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child")
#: $1: the root, $2: what to mount, as pairs FROM:TO, $3: user and group; behind them, the command.
_ENTER = """set -e
root=$1 files=$2 user=$3; shift 3
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/run"
for pair in $files; do
    to=$root${pair#*:}
    if [ -d "${pair%%:*}" ]; then mkdir -p "$to"; else mkdir -p "${to%/*}"; [ -e "$to" ] || : > "$to"; fi
    mount --bind "${pair%%:*}" "$to"
    mount -o remount,bind,ro "$to"
done
exec chroot --userspec="$user" "$root" "$@"
"""


@cache
def lacks_for_roots() -> str:
    """Return why no root can be made here; empty if one can."""
    needs = "making a root needs debootstrap, and to be root: "
    for tool, package in _PACKAGES.items():
        if shutil.which(tool) is None:
            return f"{needs}{tool} is missing (Debian: apt-get install {package})"
    return "" if os.geteuid() == 0 else f"{needs}this is another user"


@dataclass(slots=True)
class ImageRoot:
    """A stage while it is built, and the image at its end."""

    path: Path
    variables: dict[str, str]
    user: str = "0"
    directory: str = "/"
    health: list[str] = field(default_factory=list)  # the command of HEALTHCHECK

    def account(self) -> tuple[str, str, str]:
        """Return number, group and home directory of the user."""
        lines = [line.split(":") for line in (self.path / "etc/passwd").read_text().splitlines()]
        (found,) = [line for line in lines if self.user in (line[0], line[2])]
        return found[2], found[3], found[5]

    def command(
        self, words: Sequence[str], variables: Mapping[str, str] | None = None, files: Mapping[Path, str] | None = None
    ) -> list[str]:
        """Return the command line by which this machine's root runs ``words`` as the image's user would.

        Args:
            words: program and arguments.
            variables: more of the environment.
            files: what of this machine can be read in the root, and where.
        """
        user, group, home = self.account()
        mounted = {Path("/etc/resolv.conf"): "/etc/resolv.conf", Path("/etc/hosts"): "/etc/hosts", **(files or {})}
        pairs = " ".join(f"{source}:{target}" for source, target in mounted.items())
        environment = {"HOME": home, **self.variables, **(variables or {})}
        return [
            *(*_APART, "sh", "-c", _ENTER, "sh", str(self.path), pairs, f"{user}:{group}"),
            *("env", "-i", f"--chdir={self.directory}", *(f"{name}={value}" for name, value in environment.items())),
            *words,
        ]

    def command_inside(self, first: int, words: Sequence[str]) -> list[str]:
        """Return the command line that runs ``words`` beside the root's process ``first``, as `docker exec` does."""
        user, group, home = self.account()
        environment = {"HOME": home, **self.variables}
        return [
            *("nsenter", "--target", str(first), "--mount", "--pid", "--root", "--wd", "--setuid", user),
            *("--setgid", group, "env", "-i", *(f"{name}={value}" for name, value in environment.items())),
            *words,
        ]


def build_image(instructions: Sequence[Instruction], directory: Path, arguments: Mapping[str, str]) -> ImageRoot:
    """Do all instructions below ``directory``, which must be on one file system; return the last stage.

    Raises:
        ValueError: an instruction is of a form that is not known here.
        AssertionError: a command failed.
    """
    builder = _Builder(directory, dict(arguments))
    for one in instructions:
        builder.do(one)
    return builder.image


class _Builder:
    """Does one instruction after the other."""

    def __init__(self, directory: Path, arguments: Mapping[str, str]) -> None:
        self._directory = directory
        self._arguments = arguments  # of the build
        self._before: dict[str, str] = {}  # those that stand before the first stage
        self._stages: dict[str, ImageRoot] = {}
        self._declared: dict[str, str] = {}  # of the stage
        self._log = directory / "build.log"

    @property
    def image(self) -> ImageRoot:
        return next(reversed(self._stages.values()))

    def do(self, one: Instruction) -> None:
        ways: Mapping[str, Callable[[Instruction], None]] = {
            "ARG": self._arg,
            "COPY": self._copy,
            "ENV": self._env,
            "FROM": self._from,
            "HEALTHCHECK": self._healthcheck,
            "RUN": self._run,
            "USER": self._user,
            "WORKDIR": self._workdir,
        }
        if one.name not in ways:
            raise ValueError(f"{one.name} is not known here")
        ways[one.name](one)

    @property
    def _variables(self) -> dict[str, str]:
        return {**self._declared, **self.image.variables}

    def _arg(self, one: Instruction) -> None:
        name, _, default = one.text.partition("=")
        where = self._declared if self._stages else self._before
        where[name] = self._arguments.get(name, default)

    def _from(self, one: Instruction) -> None:
        base, *name = one.words(self._before)
        root = self._directory / f"stage{len(self._stages)}"
        if not (suite := re.fullmatch(r"debian:([a-z]+)-\d{8}-slim", base)):
            raise ValueError(f"{base} is not a base that debootstrap makes")
        pristine = self._directory / suite[1]
        if not pristine.exists():
            debootstrap = ["debootstrap", "--variant=minbase", suite[1], str(pristine), debian_mirror()]
            _checked([*_APART, "--mount-proc", *debootstrap], self._log)  # it mounts, too
        _checked(["cp", "-a", str(pristine), str(root)], self._log)
        self._stages[name[1] if name else ""] = ImageRoot(root, {"PATH": _PATH})
        self._declared = {}

    def _run(self, one: Instruction) -> None:
        if one.flags or one.text.startswith("["):
            raise ValueError(f"RUN {one.text!r} with {dict(one.flags)} is of a form that is not known here")
        files, settings = machine_settings(self._directory)
        command = self.image.command(["/bin/sh", "-c", one.text], {**self._declared, **settings}, files)
        _checked(command, self._log)

    def _copy(self, one: Instruction) -> None:
        source, target = one.words(self._variables)
        if one.flags.keys() - {"from"}:
            raise ValueError(f"COPY with {dict(one.flags)} is not known here")
        to = self.image.path / str(Path(self.image.directory) / target).removeprefix("/")
        if "from" in one.flags:  # linked, not copied: the other stage is thrown away
            command = ["cp", "-al", str(self._stages[one.flags["from"]].path / source.removeprefix("/")), str(to)]
            _checked(command, self._log)
            return
        if source != ".":
            raise ValueError(f"COPY {source} is not known here: all or nothing")
        for file in build_context():
            (to / file.parent).mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, to / file)

    def _env(self, one: Instruction) -> None:
        self.image.variables |= dict(word.split("=", 1) for word in one.words(self._variables))

    def _user(self, one: Instruction) -> None:
        self.image.user = expand(one.text, self._variables)

    def _workdir(self, one: Instruction) -> None:
        self.image.directory = str(Path(self.image.directory) / expand(one.text, self._variables))
        (self.image.path / self.image.directory.removeprefix("/")).mkdir(parents=True, exist_ok=True)

    def _healthcheck(self, one: Instruction) -> None:
        found = re.fullmatch(r'CMD \[((?:"[^"]+"(?:, )?)+)\]', one.text)
        if found is None:
            raise ValueError(f"HEALTHCHECK {one.text} is of a form that is not known here")
        self.image.health = re.findall(r'"([^"]+)"', found[1])


def _checked(command: Sequence[str], log: Path) -> None:
    """Run a command that must succeed. Its output is in a file, and the end of it in the error."""
    with log.open("a+b") as output:
        status = subprocess.run(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, check=False).returncode
        output.seek(0)
        end = output.read()[-4000:].decode(errors="replace")
    assert status == 0, f"{command[-1]!r} ended with status {status}:\n{end}"


def debian_mirror() -> str:
    """Return where this machine has Debian's packages from."""
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    text = "\n".join(file.read_text() for file in files if file.suffix in (".list", ".sources") and file.is_file())
    found = re.search(r"^(?:deb |URIs:).*?(\w+://\S+/debian)/?(?:\s|$)", text, re.MULTILINE)
    return found[1] if found else "http://deb.debian.org/debian"


def machine_settings(directory: Path) -> tuple[dict[Path, str], dict[str, str]]:
    """Return the files that this machine's settings of pip and apt name, and these settings as variables."""
    acquire = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True).stdout
    apt = directory / "apt.conf"
    apt.write_text("".join(line for line in acquire.splitlines(keepends=True) if line.startswith("Acquire::")))
    files = {apt: f"{_MACHINE}/apt.conf"}
    settings = {name: os.environ[name] for name in _PROXIES if name in os.environ}
    settings |= {"APT_CONFIG": files[apt], "DEBIAN_FRONTEND": "noninteractive"}
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    for name, value in re.findall(r"^(?:global|install|:env:)\.([\w-]+)='(.*)'$", pip, re.MULTILINE):
        words = value.replace("\\n", " ").split()
        settings[f"PIP_{name.upper().replace('-', '_')}"] = " ".join(_moved(word, files) for word in words)
    return files, settings


def _moved(word: str, files: dict[Path, str]) -> str:
    """A word of a setting, with the place in a root of the file that it names, which is added to ``files``."""
    url = urllib.parse.urlsplit(word)
    path = Path(url.path)
    if url.scheme not in ("", "file") or not path.is_absolute() or not path.exists():
        return word
    # A package index names files beside itself.
    source = path.parent if path.name == "simple" else path
    files[source] = f"{_MACHINE}{source}"
    return word.replace(str(path), f"{_MACHINE}{path}")
