"""What is known of a name of vLLM in one of its releases, and a table of such facts that fits into a file."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

#: A type of vLLM, "vllm.config.VllmConfig"; "[]" before it for many of them; empty if it is none of vLLM's.
TypeName = str


@dataclass(frozen=True, slots=True)
class Fact:
    """A name of vLLM. Parameters are as written: "a", "b=" with a default, "*", "*args", "**kwargs"."""

    kind: Literal["module", "class", "function", "value", "alias"]
    type: TypeName = ""  # of a value, of what a function returns, or of what an alias stands for
    parameters: tuple[str, ...] = ()  # of a function, with ``self``
    bases: tuple[TypeName, ...] = ()  # of a class

    def compact(self) -> dict[str, object]:
        return {key: value for key, value in asdict(self).items() if value}


class Names(Protocol):
    """One release's names."""

    def fact(self, name: str) -> Fact | None:
        """Return what is known of "module.name" or "module.Class.member"; None if there is no such name."""


def canonical(names: Names, name: str) -> str:
    """Follow aliases to where a name of vLLM is defined."""
    for _ in range(8):
        fact = names.fact(name)
        if fact is None or fact.kind != "alias":
            break
        name = fact.type
    return name


@dataclass
class AskedNames:
    """Passes on what ``names`` knows, and remembers all that it was asked."""

    names: Names
    asked: dict[str, Fact | None]

    def fact(self, name: str) -> Fact | None:
        if name not in self.asked:
            self.asked[name] = self.names.fact(name)
        return self.asked[name]


class UnknownNameError(LookupError):
    """A name that the table says nothing about."""


@dataclass(frozen=True)
class NameTable:
    """The facts of one release, from a file."""

    facts: Mapping[str, Fact | None]

    def fact(self, name: str) -> Fact | None:
        if name not in self.facts:
            raise UnknownNameError(name)
        return self.facts[name]


def write_tables(path: Path, releases: Mapping[str, Mapping[str, Fact | None]]) -> None:
    """Write all releases' facts. What is equal in neighbouring releases is written once, at the oldest of them."""
    names = sorted({name for facts in releases.values() for name in facts})
    rows = []
    for name in names:
        changes: dict[str, object] = {}
        before: object = ()  # no fact at all
        for release, facts in releases.items():
            fact = facts.get(name)
            now = fact.compact() if fact else None
            if now != before:
                changes[release] = now
            before = now
        rows.append(f"{json.dumps(name)}: {json.dumps(changes)}")
    text = f'{{"releases": {json.dumps(list(releases))}, "names": {{\n' + ",\n".join(rows) + "\n}}\n"
    path.write_text(text)


def read_tables(path: Path) -> dict[str, NameTable]:
    """Return the table of each release in the file, oldest first."""
    content = json.loads(path.read_text())
    tables: dict[str, dict[str, Fact | None]] = {release: {} for release in content["releases"]}
    for name, changes in content["names"].items():
        fact: Fact | None = None
        for release, facts in tables.items():
            if release in changes:
                fact = _fact(changes[release]) if changes[release] else None
            facts[name] = fact
    return {release: NameTable(facts) for release, facts in tables.items()}


def _fact(row: Mapping[str, object]) -> Fact:
    lists = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return Fact(**lists)  # type: ignore[arg-type]
