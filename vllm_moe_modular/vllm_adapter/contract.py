"""What an adapter relies on in vLLM, as data, judged from the source files without importing them.

So a release can be judged before it is run, and `doctor` can say what drifted where vLLM itself does not import.
"""

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Calls:
    """A function that we call: it still takes these parameters, and demands no others."""

    path: str  # "package.module:Class.function"
    params: tuple[str, ...]

    def drift(self, found: ast.AST) -> list[str]:
        if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            return [f"{self.path}: no longer a function"]
        have, optional = _parameters(found)
        lost = [] if found.args.kwarg else [p for p in self.params if p not in have]
        demanded = [p for p in have if p not in self.params and p not in optional]
        return [f"{self.path}: parameter {p} is gone" for p in lost] + [
            f"{self.path}: new required parameter {p}" for p in demanded
        ]


@dataclass(frozen=True, slots=True)
class Overrides:
    """A function that vLLM calls and we replace: it has exactly these parameters."""

    path: str
    params: tuple[str, ...]

    def drift(self, found: ast.AST) -> list[str]:
        if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            return [f"{self.path}: no longer a function"]
        have, _ = _parameters(found)
        return [f"{self.path}: parameter {p} is gone" for p in self.params if p not in have] + [
            f"{self.path}: new parameter {p}" for p in have if p not in self.params
        ]


@dataclass(frozen=True, slots=True)
class Reads:
    """A class, function, attribute or module-level name that we read."""

    path: str

    def drift(self, found: ast.AST) -> list[str]:  # noqa: ARG002
        return []


Expectation = Calls | Overrides | Reads


def drift(expected: Iterable[Expectation], root: Path) -> list[str]:
    """Differences in plain words; empty means that the vLLM under `root` (its package folder) is the one we know."""
    out = []
    for want in expected:
        found = _find(want.path, root)
        out += [f"{want.path}: gone"] if found is None else want.drift(found)
    return out


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[list[str], set[str]]:
    """All parameter names but self, and those of them that have a default."""
    a = function.args
    positional = [*a.posonlyargs, *a.args]
    optional = {arg.arg for arg in positional[len(positional) - len(a.defaults) :]}
    optional |= {arg.arg for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True) if default is not None}
    return [arg.arg for arg in (*positional, *a.kwonlyargs) if arg.arg not in ("self", "cls")], optional


def _find(path: str, root: Path) -> ast.AST | None:
    module, _, qualname = path.partition(":")
    parts = module.split(".")[1:]  # without the package's own name
    file = root.joinpath(*parts).with_suffix(".py") if parts else root / "__init__.py"
    if not file.is_file():
        file = root.joinpath(*parts) / "__init__.py"
    if not file.is_file():
        return None
    node: ast.AST | None = _parse(file)
    for name in qualname.split(".") if qualname else ():
        node = _member(node, name)
        if node is None:
            return None
    return node


@lru_cache(maxsize=64)
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _member(node: ast.AST | None, name: str) -> ast.AST | None:
    """A definition, an assignment, or an attribute set on self in a method, called `name` in `node`."""
    for child in getattr(node, "body", ()):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name == name:
            return child
        if _assigns(child, name):
            return child
        if isinstance(child, ast.If | ast.Try) and (found := _member(child, name)) is not None:
            return found
    if isinstance(node, ast.ClassDef):
        for child in ast.walk(node):
            if _assigns(child, name, to_self=True):
                return child
    return None


def _assigns(node: ast.AST, name: str, *, to_self: bool = False) -> bool:
    if isinstance(node, ast.ImportFrom | ast.Import):
        return any((alias.asname or alias.name) == name for alias in node.names)
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    if to_self:
        return any(isinstance(t, ast.Attribute) and t.attr == name for t in targets)
    return any(isinstance(t, ast.Name) and t.id == name for t in targets)
