"""What this project's code uses of vLLM, and where a release does not have it. Read off the source; nothing is run.

Followed are imports, attributes of what is imported, and attributes of what annotations say is an object of vLLM's:
parameters, attributes of our own classes, and what is assigned or iterated over from them. Calls are compared with the
parameters of what is called. What ``getattr`` asks for is optional, and is not looked at.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from tests.support.sources import source_file, source_tree
from tests.support.vllm_names.sources import ENUM, parameters_of
from tests.support.vllm_names.table import Fact, Names, TypeName, canonical

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
#: The classes by whose methods vLLM calls a connector.
CONNECTOR_BASES = (f"{_BASE}.KVConnectorBase_V1", f"{_BASE}.SupportsHMA")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def member(names: Names, owner: str, name: str) -> Fact | None:
    """Return what is known of a class's attribute, its bases' included."""
    found = names.fact(f"{owner}.{name}")
    if found is not None:
        return found
    fact = names.fact(owner)
    for base in fact.bases if fact else ():
        if base == ENUM:
            if name in ("name", "value"):
                return Fact("value")
        elif (found := member(names, base, name)) is not None:
            return found
    return None


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that a release does not have, or has otherwise than the code uses it."""

    where: str  # "module.Class.method"
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@cache
def _read(module: str) -> tuple[ast.Module, frozenset[int]]:
    """Return a module's tree, and the ids of the nodes that only type checkers read; nothing, if vLLM is not in it.

    It is read once for all releases.
    """
    if "vllm" not in source_file(module).read_text():
        return ast.Module([], []), frozenset()
    tree = source_tree(module)
    guards = (each for each in ast.walk(tree) if isinstance(each, ast.If) and _is_for_types(each))
    return tree, frozenset(id(node) for guard in guards for statement in guard.body for node in ast.walk(statement))


def _is_for_types(guard: ast.If) -> bool:
    return isinstance(guard.test, ast.Name) and guard.test.id == "TYPE_CHECKING"


def _is_of_vllm(node: ast.expr) -> bool:
    """Whether an expression is a dotted name that begins with vLLM's."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "vllm"


@dataclass
class _OwnClass:
    """Types of the attributes and methods of one of our classes."""

    attributes: dict[str, TypeName] = field(default_factory=dict)


@dataclass
class ModuleUses:
    """One of our modules, as it would run on a release."""

    name: str
    names: Names
    imported: dict[str, str] = field(default_factory=dict)  # local name: vLLM's
    found: list[Missing] = field(default_factory=list)
    _classes: dict[str, _OwnClass] = field(default_factory=dict)
    _narrowed: dict[str, TypeName] = field(default_factory=dict)  # of the function that is being read

    def __post_init__(self) -> None:
        self.tree, self._types_only = _read(self.name)
        self._lent = {"pd_connector.vllm.types"}

    def missing(self, skipped: frozenset[str] = frozenset()) -> list[Missing]:
        """Return what the release lacks. ``skipped``: "Class.method" that does not run on it."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and id(node) in self._types_only:
                self._import_for_types(node)
        self._visit_body(self.tree.body, self.name, {}, None)
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef):
                self._classes[node.name] = self._attributes(node)
                for method in node.body:
                    if isinstance(method, FunctionNode) and f"{node.name}.{method.name}" not in skipped:
                        self._visit_function(method, f"{self.name}.{node.name}", self._classes[node.name])
            elif isinstance(node, FunctionNode):
                self._visit_function(node, self.name, None)
        return list(dict.fromkeys(self.found))

    # Imports

    def _import_for_types(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            origin = str(node.module)
            if origin in self._lent:
                origin = self._types_of(origin).get(alias.name, "")
                self._bind(alias, origin)
            elif origin.partition(".")[0] == "vllm":
                self._bind(alias, f"{origin}.{alias.name}")

    def _bind(self, alias: ast.alias, name: str) -> None:
        if name and self.names.fact(name) is not None:
            self.imported[alias.asname or alias.name] = name

    @staticmethod
    def _types_of(module: str) -> dict[str, str]:
        return {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in source_tree(module).body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def _visit_import(self, node: ast.Import | ast.ImportFrom, where: str) -> None:
        if id(node) in self._types_only:
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "vllm" and self.names.fact(alias.name) is None:
                    self.found.append(Missing(where, f"there is no module {alias.name}"))
        elif str(node.module).partition(".")[0] == "vllm":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if self.names.fact(name) is None:
                    self.found.append(Missing(where, f"there is no {name}"))
                self._bind(alias, name)

    # Types

    def _annotated(self, annotation: ast.expr | None) -> TypeName:
        match annotation:
            case ast.Constant(value=str(text)):
                return self._annotated(ast.parse(text, mode="eval").body)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self._annotated(left) or self._annotated(right)
            case ast.Subscript(
                value=ast.Name(id="list" | "tuple" | "Sequence" | "Iterable" | "Iterator" | "set"), slice=of
            ):
                inner = self._annotated(of.elts[0] if isinstance(of, ast.Tuple) and of.elts else of)
                return f"[]{inner}" if inner else ""
            case ast.Name(id=name) if name in self.imported:
                found = canonical(self.names, self.imported[name])
                fact = self.names.fact(found)
                return found if fact and fact.kind == "class" else ""
        return ""

    def _attributes(self, node: ast.ClassDef) -> _OwnClass:
        """Return the types of what ``self`` has, as far as they are vLLM's."""
        own = _OwnClass()
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                own.attributes[each.target.id] = self._annotated(each.annotation)
            elif isinstance(each, FunctionNode) and "property" in map(ast.unparse, each.decorator_list):
                own.attributes[each.name] = self._annotated(each.returns)
        for method in node.body:
            if isinstance(method, FunctionNode):
                self._add_assigned(method, own)
        return own

    def _add_assigned(self, method: FunctionNode, own: _OwnClass) -> None:
        scope = self._parameters(method)
        for each in ast.walk(method):
            match each:
                case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                    own.attributes[name] = self._annotated(each.annotation)
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=name)], value=value):
                    own.attributes[name] = own.attributes.get(name) or self._type(value, scope, own, None)

    def _parameters(self, node: FunctionNode) -> dict[str, TypeName]:
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        return {each.arg: self._annotated(each.annotation) for each in arguments}

    def _type(  # noqa: PLR0911  a case for each form of expression
        self, node: ast.expr | None, scope: Mapping[str, TypeName], own: _OwnClass | None, where: str | None
    ) -> TypeName:
        """Return the type of an expression; report what is missing in it, unless ``where`` is None."""
        match node:
            case ast.Name(id=name):
                if name in scope:
                    return scope[name]
                fact = self.names.fact(found) if (found := self._imported(name)) else None
                return fact.type if fact and fact.kind == "value" else ""
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if own is not None:
                return own.attributes.get(name, "")
            case ast.Attribute(value=value, attr=name):
                fact = self._attribute(value, name, scope, own, where)
                return fact.type if fact and fact.kind == "value" else ""
            case ast.Call(func=function):
                return self._call(node, function, scope, own, where)
            case ast.Subscript(value=value):
                return self._type(value, scope, own, where).removeprefix("[]")
            case ast.BoolOp(values=values):
                return next((found for each in values if (found := self._type(each, scope, own, where))), "")
            case ast.IfExp(body=body, orelse=other):
                return self._type(body, scope, own, where) or self._type(other, scope, own, where)
        return ""

    def _imported(self, name: str) -> str:
        return canonical(self.names, self.imported[name]) if name in self.imported else ""

    def _attribute(
        self, value: ast.expr, name: str, scope: Mapping[str, TypeName], own: _OwnClass | None, where: str | None
    ) -> Fact | None:
        owner, fact = self._type(value, scope, own, where), None
        if owner and not owner.startswith("[]"):
            fact = member(self.names, owner, name)
        elif (origin := self._origin(value, scope)) and (known := self.names.fact(origin)):
            owner = origin
            if known.kind == "class":
                fact = member(self.names, origin, name)
            elif known.kind == "module":
                fact = self.names.fact(canonical(self.names, f"{origin}.{name}"))
            else:
                return None
        else:
            return None
        if fact is None and where is not None and not name.startswith("__"):
            self.found.append(Missing(where, f"there is no {owner}.{name}"))
        return fact

    def _origin(self, node: ast.expr, scope: Mapping[str, TypeName]) -> str:
        """Return the name of vLLM that an expression stands for: an imported one, or a dotted one."""
        if isinstance(node, ast.Name):
            return "" if node.id in scope else self._imported(node.id)
        return text if _is_of_vllm(node) and self.names.fact(text := ast.unparse(node)) is not None else ""

    def _call(
        self,
        call: ast.Call,
        function: ast.expr,
        scope: Mapping[str, TypeName],
        own: _OwnClass | None,
        where: str | None,
    ) -> TypeName:
        fact, name, bound = None, "", False
        if isinstance(function, ast.Name):
            name = self._imported(function.id) if function.id not in scope else ""
            fact = self.names.fact(name) if name else None
        elif isinstance(function, ast.Attribute):
            receiver = function.value
            if isinstance(receiver, ast.Call) and isinstance(receiver.func, ast.Name) and receiver.func.id == "super":
                return ""
            bound = bool(self._type(receiver, scope, own, None)) or self._is_class(receiver, scope)
            if fact := self._attribute(receiver, function.attr, scope, own, None):
                name = f"{self._origin(receiver, scope) or ast.unparse(receiver)}.{function.attr}"
        if fact is None:
            return ""
        if fact.kind == "class":
            constructor = member(self.names, name, "__init__")
            if constructor is not None and where is not None:
                self._compare(call, constructor, name, where, bound=True)
            return name
        if fact.kind == "function" and where is not None:
            self._compare(call, fact, name, where, bound=bound)
        return fact.type if fact.kind == "function" else ""

    def _is_class(self, node: ast.expr, scope: Mapping[str, TypeName]) -> bool:
        origin = self._origin(node, scope)
        fact = self.names.fact(origin) if origin else None
        return fact is not None and fact.kind == "class"

    def _compare(self, call: ast.Call, called: Fact, name: str, where: str, *, bound: bool) -> None:
        """Report arguments that a function does not take, and parameters that it is not given."""
        if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
            return
        parameters = called.parameters[1:] if bound else called.parameters
        star = next((index for index, each in enumerate(parameters) if each.startswith("*")), len(parameters))
        positional = [each for each in parameters[:star] if not each.startswith("**")]
        takes_more = any(each.startswith("*") and len(each) > 1 and not each.startswith("**") for each in parameters)
        named = {each.rstrip("=") for each in parameters if not each.startswith("*")}
        given = {str(each.arg) for each in call.keywords}
        if len(call.args) > len(positional) and not takes_more:
            self.found.append(Missing(where, f"{name} takes {len(positional)} arguments, not {len(call.args)}"))
        if not any(each.startswith("**") for each in parameters):
            self.found += [Missing(where, f"{name} has no parameter {each}") for each in sorted(given - named)]
        required = [each for each in positional[len(call.args) :] if not each.endswith("=")]
        required += [each for each in parameters[star:] if not each.startswith("*") and not each.endswith("=")]
        self.found += [Missing(where, f"{name} needs {each}") for each in required if each not in given]

    # Statements

    def _visit_function(self, node: FunctionNode, owner: str, own: _OwnClass | None) -> None:
        scope = self._parameters(node)
        self._narrowed = {
            each.args[0].id: self._annotated(each.args[1])  # whichever branch it is: the narrower type has more
            for each in ast.walk(node)
            if isinstance(each, ast.Call)
            and isinstance(each.func, ast.Name)
            and each.func.id == "isinstance"
            and isinstance(each.args[0], ast.Name)
        }
        scope |= self._narrowed
        self._visit_body(node.body, f"{owner}.{node.name}", scope, own)

    def _visit_body(self, body: list[ast.stmt], where: str, scope: dict[str, TypeName], own: _OwnClass | None) -> None:
        for statement in body:
            self._visit(statement, where, scope, own)

    def _visit(  # noqa: C901, PLR0912  a case for each form of statement
        self, node: ast.AST, where: str, scope: dict[str, TypeName], own: _OwnClass | None
    ) -> None:
        match node:
            case ast.Import() | ast.ImportFrom():
                self._visit_import(node, where)
                return
            case ast.ClassDef():
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if where != self.name:  # a function in a function
                    self._visit_body(node.body, where, scope | self._parameters(node), own)
                return
            case ast.If() if _is_for_types(node):
                return
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name not in self._narrowed:
                scope[name] = self._type(value, scope, own, None)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                scope[name] = self._annotated(annotation)
            case ast.For(target=ast.Name(id=name), iter=iterated):
                scope[name] = self._type(iterated, scope, own, None).removeprefix("[]")
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                for each in node.generators:
                    if isinstance(each.target, ast.Name):
                        found = self._type(each.iter, scope, own, None)
                        scope[each.target.id] = found.removeprefix("[]")
            case ast.Attribute(value=value, attr=name) if not isinstance(node.ctx, ast.Store):
                self._attribute(value, name, scope, own, where)
            case ast.Call(func=function):
                self._call(node, function, scope, own, where)
        for child in ast.iter_child_nodes(node):
            self._visit(child, where, scope, own)


# Methods that vLLM calls


def methods(node: ast.ClassDef) -> Iterator[FunctionNode]:
    """Yield the public methods of a class of ours."""
    for each in node.body:
        if isinstance(each, FunctionNode) and not each.name.startswith("_"):
            yield each


def compare_methods(names: Names, module: str, owner: str, bases: tuple[str, ...]) -> tuple[list[Missing], set[str]]:
    """Compare the methods of our class with those of vLLM's base classes.

    Returns:
        Methods that cannot be called as vLLM's can, and the names of those that vLLM's classes do not have.
    """
    (node,) = (each for each in source_tree(module).body if isinstance(each, ast.ClassDef) and each.name == owner)
    wrong, unknown = [], set()
    for method in methods(node):
        theirs = next(
            (found for base in bases if (found := member(names, canonical(names, base), method.name)) is not None), None
        )
        if theirs is None:
            unknown.add(method.name)
        elif theirs.kind == "function" and not accepts(parameters_of(method), theirs.parameters):
            text = f"takes ({', '.join(parameters_of(method))}), vLLM's ({', '.join(theirs.parameters)})"
            wrong.append(Missing(f"{module}.{owner}.{method.name}", text))
    return wrong, unknown


def accepts(ours: tuple[str, ...], theirs: tuple[str, ...]) -> bool:
    """Return whether whatever calls ``theirs`` can call ``ours``."""
    ours, theirs = ours[1:], theirs[1:]
    own_names = [each.rstrip("=") for each in ours]
    for index, each in enumerate(theirs):
        if each.startswith("**"):
            if not any(own.startswith("**") for own in ours):
                return False
        elif (
            index >= len(ours) or own_names[index] != each.rstrip("=") or ours[index].endswith("=") < each.endswith("=")
        ):
            return False
    return all(each.endswith("=") or each.startswith("*") for each in ours[len(theirs) :])
