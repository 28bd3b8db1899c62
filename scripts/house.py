"""Measures and draws the structure of `mrl/`: sizes, imports, circles, names. People read the sizes; no test does.

Nothing of it is imported or run; source files are parsed.

python scripts/house.py                          prints the figures as JSON
python scripts/house.py --executed WORK          those of one step of the tiny preset, by process; WORK must be new
python scripts/house.py --svg docs/house.svg     packages and arrows, as docs/architecture.md shows them
"""

import argparse
import ast
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYERS: dict[int, tuple[str, ...]] = {
    11: ("cli",),
    10: ("tools",),
    9: ("driver",),
    8: ("generate",),
    7: ("cluster",),
    6: ("rank", "engine"),
    5: ("store", "checkpoint", "plan"),
    4: ("process", "reshard"),
    3: ("config",),
    2: ("acting",),
    1: ("model", "algo", "data", "schedule", "reward", "record", "platforms"),
    0: ("crash_points", "errors", "plain_files", "units", "whole_file"),
}
LAYER_OF = {package: layer for layer, packages in LAYERS.items() for package in packages}
# where a package's code runs: in one process of a run, in several, or before and beside a run
PROCESSES: dict[str, tuple[str, ...]] = {
    "driver": ("driver", "generate", "cluster"),
    "rank": ("rank",),
    "engine": ("engine",),
    "engine and scorer": ("acting",),
    "user's command": ("cli", "tools"),
}
PROCESS_OF = {package: process for process, packages in PROCESSES.items() for package in packages}
COLOURS = {
    "driver": "#dce9f7",
    "rank": "#f7e0d8",
    "engine": "#dff0dc",
    "engine and scorer": "#eef5cf",
    "user's command": "#ece4f4",
    "several": "#f6f4ee",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def package_of(module: str) -> str | None:
    """The package below `mrl` that a module is in; None for `mrl` itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def top_level(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import: not those of functions, nor those under TYPE_CHECKING."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if not isinstance(node, Function):
            for name in ("body", "orelse", "finalbody"):
                yield from top_level(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from top_level(handler.body)


@dataclass(frozen=True)
class House:
    """The parsed modules of one tree, by full name."""

    modules: dict[str, ast.Module]
    sources: dict[str, str]
    tests: tuple[str, ...] = ()  # texts of files
    scripts: tuple[str, ...] = ()

    @classmethod
    def of_folder(cls, root: Path) -> "House":
        """The package `mrl` below `root`, and the texts of tests and scripts beside it."""
        sources = {}
        for path in sorted((root / "mrl").rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
        beside = [
            tuple(path.read_text(encoding="utf-8") for path in sorted((root / folder).rglob("*.py")))
            for folder in ("tests", "scripts")
        ]
        return cls({name: ast.parse(text) for name, text in sources.items()}, sources, *beside)

    def imported(self, node: ast.AST) -> Iterator[str]:
        """Full names that one import statement asks for; `from a import b` gives a.b where that is a module, else a."""
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise ValueError(f"a relative import: {ast.unparse(node)}")
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in self.modules else str(node.module)

    @cached_property
    def nodes(self) -> dict[str, list[ast.AST]]:
        """Every node of each module, functions' too."""
        return {module: list(ast.walk(tree)) for module, tree in self.modules.items()}

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """All that each module imports, inside functions too."""
        return {
            module: {name for node in nodes for name in self.imported(node)} for module, nodes in self.nodes.items()
        }

    def imports_at_import_time(self, module: str) -> set[str]:
        """What importing a module imports at once."""
        return {name for node in top_level(self.modules[module].body) for name in self.imported(node)}

    @cached_property
    def graph(self) -> dict[str, set[str]]:
        """Module -> modules of the package that it imports, deferred imports counted."""
        return {
            name: {other for other in self.imports[name] if other in self.modules and other != name}
            for name in self.modules
        }

    @cached_property
    def graph_at_import(self) -> dict[str, set[str]]:
        """Module -> modules of the package that importing it runs at once, packages above them among these."""
        graph = {}
        for name in self.modules:
            above = {part for wanted in self.imports_at_import_time(name) for part in _with_packages(wanted)}
            graph[name] = above & self.modules.keys() - {name}
        return graph

    @cached_property
    def package_graph(self) -> dict[str, set[str]]:
        """Package -> packages that it imports."""
        graph: dict[str, set[str]] = defaultdict(set)
        for module, others in self.graph.items():
            if package := package_of(module):
                graph[package] |= {there for other in others if (there := package_of(other)) and there != package}
        return dict(graph)

    def functions(self) -> Iterator[tuple[str, Function, bool]]:
        """(module, function, whether a caller outside may use it) of all functions and methods."""
        for module, tree in self.modules.items():
            yield from ((module, node, public) for node, public in _functions(tree.body, True))

    def lines(self, module: str) -> int:
        return len(self.sources[module].splitlines())


def _with_packages(module: str) -> set[str]:
    parts = module.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts) + 1)}


def closure(start: Iterable[str], graph: dict[str, set[str]]) -> set[str]:
    """All that can be reached from some nodes of a graph, these included."""
    seen, todo = set(), set(start)
    while todo:
        seen.add(node := todo.pop())
        todo |= graph.get(node, set()) - seen
    return seen


def _functions(body: Iterable[ast.stmt], public: bool) -> Iterator[tuple[Function, bool]]:
    for node in body:
        named = public and not getattr(node, "name", "_").startswith("_")
        if isinstance(node, Function):
            yield node, named
            yield from _functions(node.body, False)
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, named)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _functions(node.body, public)


def named(nodes: list[ast.AST]) -> Iterator[str]:
    """Every mention of a name in code: by itself, after a dot, or as a text that may be looked up.

    Imports are none. Neither are docstrings.
    """
    prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield from re.findall(r"\w+", node.value)


def names_for_tests_alone(house: House) -> list[str]:
    """Public functions and methods that tests name and nothing else: neither `mrl/` nor scripts."""
    used = {name for nodes in house.nodes.values() for name in named(nodes)}
    unused = [(module, node.name) for module, node, public in house.functions() if public and node.name not in used]
    return [
        f"{module}:{name}" for module, name in unused if _is_named(name, house.tests) > _is_named(name, house.scripts)
    ]


def _is_named(name: str, texts: tuple[str, ...]) -> bool:
    """Whether code names it that does not define it itself. Only texts with the word are parsed."""
    for text in texts:
        nodes = list(ast.walk(ast.parse(text))) if name in text else []
        own = any(isinstance(node, Function) and node.name == name for node in nodes)
        if name in named(nodes) and not own:
            return True
    return False


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan's strongly connected components of more than one node)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return groups


def measure(house: House) -> dict:
    """All figures of one tree as plain data."""
    by_package: Counter[str] = Counter()
    for name in house.modules:
        by_package[package_of(name) or "mrl"] += house.lines(name)
    return {
        "files": len(house.modules),
        "lines": sum(by_package.values()),
        "lines_by_package": dict(by_package.most_common()),
        "ast_nodes": sum(map(len, house.nodes.values())),
        "names_for_tests_alone": names_for_tests_alone(house),
        "circles_of_modules": circles(house.graph),
        "circles_of_packages": circles(house.package_graph),
        "basenames_in_several_packages": _shared_basenames(house),
        "class_names_defined_twice": _classes_defined_twice(house),
    }


def _shared_basenames(house: House) -> dict[str, list[str]]:
    packages = defaultdict(set)
    for name in house.modules:
        if name.count(".") > 1:
            packages[name.rpartition(".")[2]].add(package_of(name))
    return {base: sorted(where) for base, where in sorted(packages.items()) if len(where) > 1}


def _classes_defined_twice(house: House) -> list[str]:
    names = Counter(
        node.name for tree in house.modules.values() for node in tree.body if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in names.items() if count > 1 and not name.startswith("_"))


# ---------------------------------------------------------------- the picture

# pixels: width and height of a package, between packages, from layer to layer, off the middle
BOX, GAP, RISE, ASIDE = (132, 46), 24, 92, 110


def svg(house: House) -> str:
    """Packages layer by layer, in the colour of their process, and an arrow for each import between packages; sideways
    arrows are dashed.

    Every package imports `errors`, most import `units`: arrows to their layer are left out.
    """
    width = max(len(names) for names in LAYERS.values()) * (BOX[0] + GAP) + GAP + 60
    corner = {package: at for layer in LAYERS for package, at in _row(layer, width)}
    parts = [
        _arrow(corner, here, there)
        for here in corner
        for there in sorted(house.package_graph.get(here, ()))
        if there in corner and LAYER_OF[there] > 0
    ]
    parts += [_box(corner[package], package) for package in corner]
    parts += [f'<text x="12" y="{_top(layer) + 28}" class="layer">{layer}</text>' for layer in LAYERS]
    parts += list(_legend(width))
    height = _top(min(LAYERS)) + BOX[1] + GAP
    style = (
        "rect{stroke:#444}text{font:14px sans-serif;text-anchor:middle}.layer{font-size:11px;fill:#777}"
        ".legend{font-size:12px;text-anchor:start}"
        "path{fill:none;stroke:#89a;stroke-width:1.1;opacity:.55;marker-end:url(#tip)}"
        ".sideways{stroke:#b50;stroke-dasharray:5 3;opacity:1}"
    )
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0 8 4 0 8z" style="fill:#89a"/></marker>'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return "\n".join([head, f"<style>{style}</style><defs>{tip}</defs>", *parts, "</svg>", ""])


def _top(layer: int) -> int:
    return GAP + (max(LAYERS) - layer) * RISE


def _row(layer: int, width: int) -> Iterator[tuple[str, tuple[int, int]]]:
    names = LAYERS[layer]
    left = (width - len(names) * (BOX[0] + GAP) + GAP) // 2 + 12
    if len(names) == 1:  # by turns left and right, so that arrows pass beside the package
        left += ASIDE if layer % 2 else -ASIDE
    for number, name in enumerate(names):
        yield name, (left + number * (BOX[0] + GAP), _top(layer))


def _box(at: tuple[int, int], name: str) -> str:
    label = f'<text x="{at[0] + BOX[0] // 2}" y="{at[1] + 28}">{name}</text>'
    colour = COLOURS[PROCESS_OF.get(name, "several")]
    return f'<rect x="{at[0]}" y="{at[1]}" width="{BOX[0]}" height="{BOX[1]}" rx="6" fill="{colour}"/>{label}'


def _legend(width: int) -> Iterator[str]:
    """One line for each process, at the top right."""
    for number, (process, colour) in enumerate(COLOURS.items()):
        y = 14 + 20 * number
        yield f'<rect x="{width - 190}" y="{y}" width="18" height="14" fill="{colour}"/>'
        yield f'<text x="{width - 164}" y="{y + 12}" class="legend">{process}</text>'


def _arrow(corner: dict[str, tuple[int, int]], here: str, there: str) -> str:
    (x1, y1), (x2, y2) = corner[here], corner[there]
    if y1 == y2:
        side = BOX[0] if x2 > x1 else 0
        middle = (x1 + x2 + BOX[0]) // 2
        start, end = f"{x1 + side} {y1 + 12}", f"{x2 + BOX[0] - side} {y2 + 12}"
        return f'<path class="sideways" d="M{start} Q{middle} {y1 - 22} {end}"/>'
    x1, x2 = x1 + BOX[0] // 2, x2 + BOX[0] // 2
    return f'<path d="M{x1} {y1 + BOX[1]} C{x1} {y1 + BOX[1] + 40} {x2} {y2 - 40} {x2} {y2}"/>'


def executed(work: Path) -> dict:
    """What runs in a step of the default preset: see scripts/executed. `work` is a new folder."""
    sys.path.insert(0, str(ROOT / "scripts" / "executed"))
    import measure

    return measure.of_default_preset(work)


def main() -> None:
    """Prints the figures, or writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--executed", type=Path, metavar="WORK", help="train the tiny world in WORK; count what a step runs"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.executed:
        print(json.dumps(executed(args.executed), indent=2))
        return
    here = House.of_folder(ROOT)
    if args.svg:
        args.svg.write_text(svg(here), encoding="utf-8")
        return
    print(json.dumps(measure(here), indent=2))


if __name__ == "__main__":
    main()
