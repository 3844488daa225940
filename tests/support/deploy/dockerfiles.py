"""The instructions of ``deploy/Dockerfile.*``, and the files that a build is sent. Only what is used there is known."""

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tests.support.sources import ROOT

IMAGES = ("cpu", "cuda", "npu")
_KNOWN = ("ARG", "COPY", "ENTRYPOINT", "ENV", "FROM", "HEALTHCHECK", "RUN", "USER", "WORKDIR")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: ``COPY --from=build a b`` has the flags {"from": "build"} and the text "a b"."""

    name: str
    flags: Mapping[str, str]
    text: str

    def words(self, variables: Mapping[str, str]) -> list[str]:
        """Return the words of the text, with the values of variables in their places."""
        return shlex.split(expand(self.text, variables))


def dockerfile(platform: str) -> Path:
    """Return the Dockerfile of a platform."""
    return ROOT / "deploy" / f"Dockerfile.{platform}"


def read_instructions(text: str) -> list[Instruction]:
    """Return the instructions of a Dockerfile.

    Raises:
        ValueError: one is not known here.
    """
    without_comments = "".join(line for line in text.splitlines(keepends=True) if not line.lstrip().startswith("#"))
    lines = without_comments.replace("\\\n", " ").splitlines()
    return [_instruction(line) for line in lines if line.strip()]


def _instruction(line: str) -> Instruction:
    name, _, rest = line.strip().partition(" ")
    if name not in _KNOWN:
        raise ValueError(f"{line!r} is not one of {', '.join(_KNOWN)}")
    flags: dict[str, str] = {}
    rest = rest.strip()
    while match := re.match(r"--([\w-]+)=(\S+)\s+", rest):
        flags[match[1]] = match[2]
        rest = rest[match.end() :]
    return Instruction(name, flags, rest)


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Return the text with the values of $NAME and ${NAME}.

    Raises:
        KeyError: a variable has no value.
    """
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: variables[found[1] or found[2]], text)


def bases(instructions: list[Instruction]) -> list[str]:
    """Return the images that the stages begin with, by the arguments' defaults."""
    arguments: dict[str, str] = {}
    found = []
    for one in instructions:
        if one.name == "ARG":
            name, _, value = one.text.partition("=")
            arguments[name] = value
        elif one.name == "FROM":
            found.append(one.words(arguments)[0])
    return found


def last_stage(instructions: list[Instruction]) -> list[Instruction]:
    """Return the instructions of the stage that becomes the image."""
    start = max(number for number, one in enumerate(instructions) if one.name == "FROM")
    return instructions[start:]


def build_context(root: Path = ROOT) -> list[Path]:
    """Return the files that a build is sent, relative to ``root``: those that its .dockerignore does not leave out."""
    lines = (root / ".dockerignore").read_text().splitlines()
    rules = [(line.removeprefix("!"), line.startswith("!")) for line in lines if line and not line.startswith("#")]
    return sorted(_included(root, rules))


def _included(root: Path, rules: list[tuple[str, bool]]) -> Iterator[Path]:
    for directory, below, names in os.walk(root):
        here = Path(directory).relative_to(root)
        wanted = [pattern for pattern, is_wanted in rules if is_wanted]
        # A directory is looked into if it is sent, or a rule asks for something below it.
        below[:] = [
            name
            for name in below
            if _is_sent(here / name, rules) or any(each.startswith(f"{(here / name).as_posix()}/") for each in wanted)
        ]
        yield from (here / name for name in names if _is_sent(here / name, rules))


def _is_sent(path: Path, rules: list[tuple[str, bool]]) -> bool:
    """The last rule that fits decides; one that fits a directory fits all below it."""
    sent = True
    for pattern, is_wanted in rules:
        if any(_fits(place, pattern) for place in (path, *path.parents)):
            sent = is_wanted
    return sent


def _fits(path: Path, pattern: str) -> bool:
    expression = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
    return re.fullmatch(expression, PurePosixPath(path).as_posix()) is not None and path != Path()
