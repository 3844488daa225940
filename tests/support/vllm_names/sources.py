"""Facts about vLLM's names, read off the sources of a wheel or an unpacked one. Nothing is imported."""

import ast
import zipfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from tests.support.vllm_names.table import Fact, TypeName, canonical

ENUM = "enum.Enum"


class Sources:
    """The modules of one release."""

    def __init__(self, wheel: Path) -> None:
        """Read ``wheel``, a file or a directory that holds the package ``vllm``."""
        self._wheel = wheel
        self._trees: dict[str, ast.Module | None] = {}

    def fact(self, name: str) -> Fact | None:
        """Implement ``Names``."""
        if self.tree(name) is not None:
            return Fact("module")
        owner, _, last = name.rpartition(".")
        if not owner:
            return None
        if self.tree(owner) is not None:
            return self._top_level(owner, last)
        found = self.class_definition(owner)
        return self._member(*found, last) if found else None

    def tree(self, module: str) -> ast.Module | None:
        if module not in self._trees:
            source = self._read(module)
            self._trees[module] = ast.parse(source) if source is not None else None
        return self._trees[module]

    def class_definition(self, name: str) -> tuple[str, ast.ClassDef] | None:
        """Return the module and the definition of "module.Class"."""
        module, _, last = name.rpartition(".")
        if self.tree(module) is None:
            return None
        for node in _statements(self.tree(module)):
            if isinstance(node, ast.ClassDef) and node.name == last:
                return module, node
        return None

    def type_name(self, module: str, annotation: ast.expr | None) -> TypeName:  # noqa: PLR0911  a case for each form
        """Return what an annotation says of vLLM's classes; empty if nothing."""
        match annotation:
            case ast.Constant(value=str(text)):
                return self.type_name(module, ast.parse(text, mode="eval").body)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self.type_name(module, left) or self.type_name(module, right)
            case ast.Subscript(value=ast.Name(id="list" | "tuple" | "Sequence" | "Iterable" | "set"), slice=of):
                element = of.elts[0] if isinstance(of, ast.Tuple) and of.elts else of
                inner = self.type_name(module, element)
                return f"[]{inner}" if inner else ""
            case ast.Subscript(value=ast.Name(id="Optional" | "ClassVar" | "Final"), slice=of):
                return self.type_name(module, of)
            case ast.Name(id=name):
                fact = self._top_level(module, name)
                if fact is None or fact.kind not in ("class", "alias"):
                    return ""
                found = canonical(self, f"{module}.{name}")
                return found if self.class_definition(found) else ""
        return ""

    def _read(self, module: str) -> str | None:
        path = module.replace(".", "/")
        for candidate in (f"{path}.py", f"{path}/__init__.py"):
            if self._wheel.is_dir():
                if (self._wheel / candidate).is_file():
                    return (self._wheel / candidate).read_text()
            elif candidate in self._members:
                return self._archive.read(candidate).decode()
        return None

    @cached_property
    def _archive(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self._wheel)

    @cached_property
    def _members(self) -> frozenset[str]:
        return frozenset(self._archive.namelist())

    def _top_level(self, module: str, name: str) -> Fact | None:
        for node in _statements(self.tree(module)):
            match node:
                case ast.ClassDef(name=own) if own == name:
                    bases = tuple(base for each in node.bases if (base := self._base(module, each)))
                    return Fact("class", bases=bases)
                case ast.ImportFrom(module=str(origin)) | ast.ImportFrom(module=origin) if origin and (
                    found := next((each for each in node.names if (each.asname or each.name) == name), None)
                ):
                    return Fact("alias", f"{_absolute(module, node, self._is_package(module))}.{found.name}")
                case _ if (fact := self._definition(module, node, name)) is not None:
                    return fact
        return None

    def _definition(self, module: str, node: ast.stmt, name: str) -> Fact | None:
        """Return the fact if ``node``, of a module or a class, defines ``name`` as a function or a value."""
        match node:
            case ast.FunctionDef(name=own) | ast.AsyncFunctionDef(name=own) if own == name:
                return self._function(module, node)
            case ast.AnnAssign(target=ast.Name(id=own)) if own == name:
                return Fact("value", self.type_name(module, node.annotation))
            case ast.Assign() if any(isinstance(each, ast.Name) and each.id == name for each in node.targets):
                return Fact("value")
        return None

    def _base(self, module: str, node: ast.expr) -> TypeName:
        node = node.value if isinstance(node, ast.Subscript) else node  # of a generic class
        return ENUM if ast.unparse(node).endswith("Enum") else self.type_name(module, node)

    def _is_package(self, module: str) -> bool:
        path = f"{module.replace('.', '/')}/__init__.py"
        return (self._wheel / path).is_file() if self._wheel.is_dir() else path in self._members

    def _function(self, module: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Fact:
        if any(_decorator(each) in ("property", "cached_property") for each in node.decorator_list):
            return Fact("value", self.type_name(module, node.returns))
        parameters = parameters_of(node)
        decorators = {_decorator(each) for each in node.decorator_list}
        if "staticmethod" in decorators:
            parameters = ("self", *parameters)
        if "contextmanager" in decorators:
            return Fact("function", "", parameters)
        return Fact("function", self.type_name(module, node.returns), parameters)

    def _member(self, module: str, owner: ast.ClassDef, name: str) -> Fact | None:
        if name == "__init__" and (fields := self._data_class_parameters(module, owner)) is not None:
            return Fact("function", "", ("self", *fields))
        for node in owner.body:
            if (fact := self._definition(module, node, name)) is not None:
                return fact
        return self._assigned(module, owner, name)

    def _assigned(self, module: str, owner: ast.ClassDef, name: str) -> Fact | None:
        """Return a fact about ``self.name``, if a method of the class assigns it."""
        for method in owner.body:
            if not isinstance(method, ast.FunctionDef):
                continue
            annotations = {each.arg: each.annotation for each in (*method.args.args, *method.args.kwonlyargs)}
            for node in ast.walk(method):
                match node:
                    case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=own)) if own == name:
                        return Fact("value", self.type_name(module, node.annotation))
                    case ast.Assign(value=value) if any(_is_own(each, name) for each in node.targets):
                        return Fact("value", self._type_of(module, owner, value, annotations))
        return None

    def _type_of(
        self, module: str, owner: ast.ClassDef, value: ast.expr, annotations: dict[str, ast.expr | None]
    ) -> TypeName:
        match value:
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                fact = self._member(module, owner, name)
                return fact.type if fact else ""
            case ast.Attribute(value=inner, attr=name):
                found = self._type_of(module, owner, inner, annotations)
                fact = self.fact(f"{found}.{name}") if found else None
                return fact.type if fact and fact.kind == "value" else ""
            case ast.Name(id=parameter) if parameter in annotations:
                return self.type_name(module, annotations[parameter])
            case ast.Call(func=ast.Name(id=name)):
                found = canonical(self, f"{module}.{name}")
                if self.class_definition(found):
                    return found
                fact = self.fact(found)
                return fact.type if fact and fact.kind == "function" else ""
        return ""

    def _data_class_parameters(self, module: str, owner: ast.ClassDef) -> tuple[str, ...] | None:
        """Return the parameters of a class whose constructor is made of its fields; None if it has one of its own."""
        if any(isinstance(node, ast.FunctionDef) and node.name == "__init__" for node in owner.body):
            return None
        decorators = {_decorator(each) for each in owner.decorator_list}
        bases = [canonical(self, f"{module}.{each.id}") for each in owner.bases if isinstance(each, ast.Name)]
        of_events = owner.name in ("KVCacheEvent", "BlockStored", "BlockRemoved")
        is_struct = of_events or any(base.startswith("msgspec") for base in bases)
        if not (decorators & {"dataclass", "config"} or is_struct):
            return None
        inherited: tuple[str, ...] = ()
        for base in bases:
            if found := self.class_definition(base):
                inherited += self._data_class_parameters(*found) or ()
        own = tuple(
            f"{node.target.id}=" if node.value is not None else node.target.id
            for node in owner.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not _is_class_variable(node)
        )
        names = {each.rstrip("=") for each in own}
        return (*(each for each in inherited if each.rstrip("=") not in names), *own)


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    """Return a function's parameters as ``Fact`` has them."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    plain = len(positional) - len(arguments.defaults)
    found = [each.arg + ("=" if index >= plain else "") for index, each in enumerate(positional)]
    if arguments.vararg:
        found.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        found.append("*")
    found += [
        each.arg + ("=" if default is not None else "")
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        found.append(f"**{arguments.kwarg.arg}")
    return tuple(found)


def _statements(node: ast.Module | None) -> Iterator[ast.stmt]:
    """Yield a module's statements, those in its branches too."""
    waiting: list[ast.stmt] = list(node.body) if node else []
    while waiting:
        statement = waiting.pop(0)
        yield statement
        if isinstance(statement, ast.If):
            waiting[:0] = [*statement.body, *statement.orelse]
        elif isinstance(statement, ast.Try):
            waiting[:0] = [*statement.body, *(each for handler in statement.handlers for each in handler.body)]


def _decorator(node: ast.expr) -> str:
    while isinstance(node, ast.Call | ast.Attribute):
        if isinstance(node, ast.Attribute):
            return node.attr
        node = node.func
    return node.id if isinstance(node, ast.Name) else ""


def _is_own(node: ast.expr, name: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and node.attr == name
    )


def _is_class_variable(node: ast.AnnAssign) -> bool:
    return "ClassVar" in ast.unparse(node.annotation)


def _absolute(module: str, node: ast.ImportFrom, is_package: bool) -> str:
    if not node.level:
        return str(node.module)
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])
