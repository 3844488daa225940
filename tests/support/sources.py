"""The source files of this project: its modules, and what each of them imports. Nothing is imported to find out."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


def modules(package: str) -> list[str]:
    """The names of all modules of a package, or the one of that name."""
    path = ROOT / package.replace(".", "/")
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    names = [file.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for file in files]
    assert names, f"there is no {package}"
    return [name.removesuffix(".__init__") for name in names]


@cache
def source_file(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def source_tree(module: str) -> ast.Module:
    return ast.parse(source_file(module).read_text())


@cache
def is_module(name: str) -> bool:
    """Whether a module of this project has that name."""
    return source_file(name).is_file()


@cache
def imports(module: str) -> tuple[str, ...]:
    """What a module imports, in functions and under TYPE_CHECKING too; of ``from a import b`` ``a`` and ``a.b``."""
    found: list[str] = []
    for node in _statements(source_tree(module)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            assert node.module is not None
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return tuple(found)


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All statements, also those that others consist of."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, part, ())


def is_within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def is_test_module(module: str) -> bool:
    name = module.rpartition(".")[2]
    return name.startswith("test_") or name == "conftest"
