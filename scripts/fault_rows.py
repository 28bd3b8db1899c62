"""Text of docs/faults.md: what a run is held against, and which tests bring it about (docs/source/faults.yaml)."""

import ast
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "docs" / "source" / "faults.yaml"
_INTRO = """# Faults

Faults that a run must survive or report: what must happen, and the tests below `tests/` that cause each. Those marked
long run with `scripts/test.sh long`; `tests/proofs/test_kills.py` uses real signals. `SECURITY.md` names the test of
each promise the same way.
"""
_BAD_INPUT = "\n## Inputs\n\nInput that a run must refuse or do without, each with one message.\n"


def page() -> str:
    """The whole page."""
    table = rows()
    return "\n".join([_INTRO, markdown(table["matrix"]), _BAD_INPUT, markdown(table["bad_input"]), ""])


@cache
def rows() -> dict[str, list[dict[str, Any]]]:
    """Both tables as they stand in the file."""
    return yaml.safe_load(SOURCE.read_text(encoding="utf-8"))


def wrong(table: list[dict[str, Any]]) -> list[str]:
    """Whatever is wrong with rows, one message each."""
    found = []
    for row in table:
        found += [f"{row['fault']}: no {key}" for key in ("must", "tests") if not row.get(key)]
        found += [f"{row['fault']}: no {test}" for test in row.get("tests", []) if not is_test(test)]
    return found


def is_test(name: str) -> bool:
    """Whether FILE::FUNCTION, below tests/, is a test that is there."""
    file, _, function = name.partition("::")
    return bool(function) and (ROOT / "tests" / file).is_file() and function in functions(file)


@cache
def functions(file: str) -> dict[str, bool]:
    """The functions of a file at its outermost level, and whether each is wholly marked `long`."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    marked = [
        node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    whole = any("mark.long" in ast.unparse(node) for node in marked)
    defined = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name: whole or any(_is_long(mark) for mark in node.decorator_list) for node in defined}


def _is_long(mark: ast.expr) -> bool:
    return ast.unparse(mark) in ("pytest.mark.long", "long")


def markdown(table: list[dict[str, Any]]) -> str:
    """Rows as a table; bars in cells are kept from ending them."""
    cells = [[str(n), row["fault"], row["must"], _shown_by(row)] for n, row in enumerate(table, 1)]
    lines = [["", "fault", "must", "shown by"], ["---"] * 4, *cells]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _shown_by(row: dict[str, Any]) -> str:
    by_file: dict[str, list[str]] = {}
    for test in row["tests"]:
        file, _, function = test.partition("::")
        mark = " (long)" if functions(file)[function] else ""
        by_file.setdefault(file, []).append(f"`{function.removeprefix('test_')}`{mark}")
    lacks = f". **Not shown:** {row['lacks']}" if "lacks" in row else ""
    return "; ".join(f"{file}: {', '.join(names)}" for file, names in by_file.items()) + lacks
