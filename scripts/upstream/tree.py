"""A package's source as a tree of names: where a dotted name is defined, and with which signature. Nothing is imported.

So a wheel of another platform, or of another version than the installed one, is read like any other folder.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

_DEPTH = 12  # of re-exports


@dataclass(frozen=True)
class Signature:
    """Parameters without `self`; `open`: it takes any positional, any keyword arguments."""

    positional: tuple[str, ...]
    required: tuple[str, ...]
    keywords: tuple[str, ...]  # all that can be given by name
    takes_args: bool
    takes_kwargs: bool

    def refuses(self, positional: int, keywords: tuple[str, ...], is_open: bool) -> str | None:
        """Why a call would be refused; None where it would not."""
        if unknown := [name for name in keywords if name not in self.keywords and not self.takes_kwargs]:
            return f"takes no {', '.join(unknown)}"
        if positional > len(self.positional) and not self.takes_args:
            return f"takes {len(self.positional)} positional arguments, not {positional}"
        given = {*self.positional[:positional], *keywords}
        if not is_open and (missing := [name for name in self.required if name not in given]):
            return f"needs {', '.join(missing)}"
        return None

    def __str__(self) -> str:
        words = [name if name in self.required else f"{name}=" for name in self.positional]
        words += ["*args"] if self.takes_args else []
        words += [
            f"*{name}" if name in self.required else f"*{name}="
            for name in self.keywords
            if name not in self.positional
        ]
        return f"({', '.join([*words, *(['**kwargs'] if self.takes_kwargs else [])])})"


@dataclass(frozen=True)
class Found:
    """What a name is. `place`: file and line in the package. `signature`: None of what is not called, or cannot be
    read.
    """

    place: str
    node: ast.AST | None
    module: str
    signature: Signature | None = None


class Tree:
    """All packages below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.module = cache(self._module)
        self._answers: dict[tuple[str, ...], Found | None] = {}  # of one search: modules that star-import each other

    def find(self, dotted: str, depth: int = 0) -> Found | None:
        """The longest part of the name that is a module, then names in it; None where one is missing."""
        if not depth:
            self._answers.clear()
        found = self._find(dotted, depth)
        if depth or found is None or not isinstance(found.node, ast.ClassDef):
            return found
        return replace(found, signature=self._signature(self.module(found.module), found.node, 0))

    def _find(self, dotted: str, depth: int) -> Found | None:
        parts = dotted.split(".")
        for length in range(len(parts), 0, -1):
            name = ".".join(parts[:length])
            if self.file(name) is not None:
                found = self._inside(name, parts[length:], depth)
                if found is not None or length == len(parts):
                    return found
            elif (self.root.joinpath(*parts[:length])).is_dir() and length == len(parts):
                return Found(name, None, name)
        return None

    def file(self, module: str) -> Path | None:
        """Of a module or of a package's __init__."""
        base = self.root.joinpath(*module.split("."))
        return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)

    def _module(self, name: str) -> "Module":
        path = self.file(name)
        return Module(name, path, ast.parse(path.read_text(encoding="utf-8", errors="replace")))

    def _inside(self, name: str, rest: list[str], depth: int) -> Found | None:
        """Each module is asked for a name once a search: the ways through circles of star-imports are countless."""
        asked = (name, *rest)
        if asked not in self._answers:
            self._answers[asked] = None
            self._answers[asked] = self._inside_once(name, rest, depth)
        return self._answers[asked]

    def _inside_once(self, name: str, rest: list[str], depth: int) -> Found | None:
        module = self.module(name)
        if not rest:
            return Found(self._place(module, None), None, name)
        if depth > _DEPTH:
            return None
        for node in reversed(module.names.get(rest[0], ())):  # of overloads the last is the function
            found = self._defined(module, node, rest, depth)
            if found is not None:
                return found
        for star in module.stars:
            if self.file(star) and (found := self._inside(star, rest, depth + 1)) is not None:
                return found
        lazy = module.lazy.get(rest[0])
        return self.find(".".join([lazy, *rest[1:]]), depth + 1) if lazy else None

    def _defined(self, module: "Module", node: ast.AST, rest: list[str], depth: int) -> Found | None:
        if isinstance(node, ast.alias):
            return self.find(".".join([module.origin(node), *rest[1:]]), depth + 1)
        if isinstance(node, ast.ClassDef) and len(rest) > 1:
            return (
                self._member(module, node, rest[1], depth)
                if len(rest) == 2
                else Found(self._place(module, node), node, module.name)
            )
        return Found(self._place(module, node), node, module.name, signature_of(node))

    def _member(self, module: "Module", node: ast.ClassDef, name: str, depth: int) -> Found | None:
        for owner, of in self._bases(module, node, depth):
            if (member := members(of).get(name)) is not None:
                return Found(
                    self._place(owner, member), member, owner.name, signature_of(member, bound=not _is_static(member))
                )
        return None

    def _bases(self, module: "Module", node: ast.ClassDef, depth: int) -> Iterator[tuple["Module", ast.ClassDef]]:
        """The class and those below it, as far as they are in this tree."""
        yield module, node
        for base in node.bases if depth < _DEPTH else ():
            text = ast.unparse(base).partition("[")[0]
            found = self._inside(module.name, text.split("."), depth + 1)
            if found is not None and isinstance(found.node, ast.ClassDef):
                yield from self._bases(self.module(found.module), found.node, depth + 1)

    def _signature(self, module: "Module", node: ast.ClassDef, depth: int) -> Signature | None:
        """Of the constructor: __init__, or a dataclass's fields, base classes first."""
        chain = list(self._bases(module, node, depth))
        for _, of in chain:
            if (own := members(of).get("__init__")) is not None:
                return signature_of(own, bound=True)
            if _has_fields(of):
                return _of_fields([each for _, each in reversed(chain)])
        return None

    def _place(self, module: "Module", node: ast.AST | None) -> str:
        line = f":{node.lineno}" if node is not None and hasattr(node, "lineno") else ""
        return f"{module.path.relative_to(self.root).as_posix()}{line}"


@dataclass(frozen=True)
class Module:
    """One file."""

    name: str
    path: Path
    tree: ast.Module

    @cached_property
    def names(self) -> dict[str, list[ast.AST]]:
        """Name -> what may define it at the top level, in conditions and try blocks too."""
        found: dict[str, list[ast.AST]] = {}
        for node in _statements(self.tree.body):
            for name, what in _names_of(node):
                found.setdefault(name, []).append(what)
        return found

    @cached_property
    def stars(self) -> list[str]:
        """Modules of `from x import *`."""
        imports = (node for node in _statements(self.tree.body) if isinstance(node, ast.ImportFrom))
        return [self._from(node) for node in imports if any(alias.name == "*" for alias in node.names)]

    @cached_property
    def lazy(self) -> dict[str, str]:
        """Names that a module's __getattr__ looks up in a table of strings, ".module:name"."""
        pairs = (
            (k, v)
            for n in ast.walk(self.tree)
            if isinstance(n, ast.Dict)
            for k, v in zip(n.keys, n.values, strict=True)
        )
        texts = ((k.value, v.value) for k, v in pairs if isinstance(k, ast.Constant) and isinstance(v, ast.Constant))
        return {
            k: f"{self._package}{v.replace(':', '.')}"
            for k, v in texts
            if isinstance(v, str) and v.startswith(".") and ":" in v
        }

    @property
    def _package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    def origin(self, alias: ast.alias) -> str:
        """The dotted path behind an imported name."""
        for node in _statements(self.tree.body):
            if isinstance(node, ast.ImportFrom) and alias in node.names:
                return f"{self._from(node)}.{alias.name}"
        return alias.name if alias.asname else alias.name.partition(".")[0]

    def _from(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        base = self._package.split(".")
        base = base[: len(base) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Of a module, through if, try and with."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _statements(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _names_of(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name, node
    elif isinstance(node, ast.Assign):
        targets = (t for target in node.targets for t in (target.elts if isinstance(target, ast.Tuple) else [target]))
        yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, node
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (((a.asname or a.name.partition(".")[0]), a) for a in node.names if a.name != "*")


@cache  # a class is asked for one name after the other
def members(node: ast.ClassDef) -> dict[str, ast.AST]:
    """Methods, class attributes, and what methods assign to `self`."""
    found: dict[str, ast.AST] = {}
    for each in ast.walk(node):
        stored = (
            isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and isinstance(each.value, ast.Name)
        )
        if stored and each.value.id in ("self", "cls"):
            found.setdefault(each.attr, each)
    for each in _statements(node.body):
        found |= dict(_names_of(each))
    return found


def _has_fields(node: ast.ClassDef) -> bool:
    """A dataclass (vLLM has a decorator of its own), or a msgspec.Struct."""
    decorators = [ast.unparse(each) for each in node.decorator_list]
    return any("dataclass" in text or text.startswith("config") for text in decorators) or any(
        ast.unparse(base).endswith("Struct") for base in node.bases
    )


def _is_static(node: ast.AST) -> bool:
    return any(ast.unparse(d) == "staticmethod" for d in getattr(node, "decorator_list", []))


def signature_of(node: ast.AST, bound: bool = False) -> Signature | None:
    """Of a function; `bound`: its first parameter is the object."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    given = node.args
    positional = [a.arg for a in [*given.posonlyargs, *given.args]][int(bound) :]
    defaults = len(given.defaults)
    required = positional[: len(positional) - defaults] if defaults else positional
    needed = [a.arg for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True) if d is None]
    only = [a.arg for a in given.args][int(bound and not given.posonlyargs) :]
    keywords = (*only, *(a.arg for a in given.kwonlyargs))
    return Signature(
        tuple(positional), (*required, *needed), keywords, given.vararg is not None, given.kwarg is not None
    )


def _of_fields(classes: list[ast.ClassDef]) -> Signature:
    fields: dict[str, bool] = {}
    for node in classes:
        for each in node.body:
            if (
                isinstance(each, ast.AnnAssign)
                and isinstance(each.target, ast.Name)
                and "ClassVar" not in ast.unparse(each.annotation)
            ):
                fields[each.target.id] = each.value is None and fields.get(each.target.id, True)
    names = tuple(fields)
    return Signature(names, tuple(name for name in names if fields[name]), names, False, False)
