"""What the import of a module of this project needs, found in its source."""

import ast
from collections.abc import Iterator
from functools import cache

from tests.support.sources import source_file, source_tree

PACKAGES = ("layout", "transfer", "pd_connector", "pd_proxy")
#: What the wheel does not declare: engines have a build of vLLM for their platform, which brings the others.
FROM_THE_PLATFORM = {"prometheus_client", "torch", "triton", "vllm"}
#: What a machine without vLLM can use all the same.
WITHOUT_VLLM = ("layout", "transfer.engine", "transfer.control", "transfer.copies.batch", "pd_connector.doctor")


def imported_at_once(module: str) -> Iterator[str]:
    """What a module imports when it is imported: not in functions, not for type checkers."""
    waiting: list[ast.AST] = [source_tree(module)]
    while waiting:
        match waiting.pop():
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(name), names=names):
                yield name
                yield from (f"{name}.{alias.name}" for alias in names)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                pass
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case node:
                waiting += ast.iter_child_nodes(node)


@cache
def lacks(module: str) -> frozenset[str]:
    """What of the platform's packages the import of a module needs, by itself and by what it imports."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        top = name.partition(".")[0]
        found |= {top} & FROM_THE_PLATFORM
        if name in seen or top not in PACKAGES or not source_file(name).is_file():
            continue
        seen.add(name)
        waiting += [*imported_at_once(name), name.rpartition(".")[0]]
    return frozenset(found)
