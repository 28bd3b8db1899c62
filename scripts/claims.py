"""The tables of claims and faults (docs/source) beside the stored results: figures, bounds, tests.

A template of a figure is text with Python expressions in braces; names in them are keys of the result's JSON.
"""

import ast
import gzip
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "docs" / "source" / "claims.yaml"
FAULTS = SOURCE.with_name("faults.yaml")
OUTSIDE = ROOT / "tests" / "outside"
DIFFERENCES = OUTSIDE / "differences.yaml"
RESULTS = ROOT / "docs" / "results"
MOST_WORDS = 40  # of a cell
TOLD = ("date", "load")  # by every part of a result that names a commit, or once for its whole file
# what expressions may call; they are this repository's own text, as its scripts are
CALLS = {"abs": abs, "all": all, "any": any, "len": len, "max": max, "min": min, "round": round, "sorted": sorted}
CALLS |= {"sum": sum, "set": set, "zip": zip, "enumerate": enumerate, "str": str}
NAMED = re.compile(r"(?:tests|scripts)/[\w/.-]+\.(?:py|sh)")
# where a clone lay; the homes of made-up users in the words of others' scripts are none
PLACE = re.compile(r"(?<![\w.])/(?!home/user/)[\w./-]+/(?:parallel_configs|mrl|scripts|docs|tests)/")
LONG = re.compile(r"mark\s*\.\s*long")
FIGURE = re.compile(r"(<!-- figure (\w+): (.+?) -->)(.*?)(<!-- end -->)", re.DOTALL)
TABLE = re.compile(r"(<!-- table (\w+) -->\n\n)(.*?)\n(<!-- end -->)", re.DOTALL)


class Node(dict):
    """A JSON object whose keys are attributes too."""

    def __getattribute__(self, name: str) -> Any:
        return self[name] if name in self else super().__getattribute__(name)


def _node(value: Any) -> Any:
    """A JSON value with attributes at every depth."""
    if isinstance(value, dict):
        return Node({key: _node(inner) for key, inner in dict.items(value)})
    return [_node(inner) for inner in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Result:
    """A stored result, or a part of one, with what makes it and what it depends on."""

    name: str
    file: str  # under docs/results
    sources: tuple[str, ...]  # files and folders that it depends on
    minutes: float  # that its command takes on two cores
    at: str = ""  # the part's key
    command: str = ""  # to make it anew; the file's own where there is none
    once: bool = False  # of the past, or made by hand: scripts/evidence/all.sh leaves it
    needs: str = ""  # beyond two cores
    older: bool = False  # a part of it was made before TOLD was asked for

    def data(self) -> Any:
        """The JSON of the part; of a `.jsonl` an object with its `lines`. Raises KeyError or OSError."""
        held = self.whole()
        return held[self.at] if self.at else held

    def whole(self) -> dict[str, Any]:
        """The JSON of its file, whichever part of it this is."""
        return _stored(RESULTS / self.file)

    @property
    def where(self) -> str:
        """The file and part in words."""
        return f"docs/results/{self.file}" + (f" ({self.at})" if self.at else "")

    def stamps(self) -> list[dict]:
        """Every object of it that names a commit."""
        return list(_with_commit(self.data()))

    def commands(self) -> set[str]:
        """What it says that it was made by."""
        found = {stamp["command"] for stamp in self.stamps() if "command" in stamp}
        whole = self.whole()
        return found | {whole["command"]} if isinstance(whole.get("command"), str) else found

    def untold(self) -> list[dict]:
        """Objects of it that name a commit, for which neither they nor the whole file say all of TOLD."""
        whole = self.whole()
        return [stamp for stamp in self.stamps() if any(key not in stamp and key not in whole for key in TOLD)]

    def names(self, let: dict[str, str] | None = None) -> dict[str, Any]:
        """What an expression over it may use: its keys, and what `let` makes of them."""
        data = self.data()
        names = {"__builtins__": {}} | CALLS | data | {"data": data}
        for name, expression in (let or {}).items():
            names[name] = eval(expression, names)
        return names


@cache
def _stored(path: Path) -> Node:
    text = path.read_text(encoding="utf-8")
    return _node({"lines": list(map(json.loads, text.splitlines()))} if path.suffix == ".jsonl" else json.loads(text))


def forget() -> None:
    """Results are read anew."""
    _stored.cache_clear()


def _with_commit(value: Any) -> Iterator[dict]:
    if isinstance(value, dict):
        if isinstance(value.get("commit"), str):
            yield value
        for inner in dict.values(value):
            yield from _with_commit(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _with_commit(inner)


@cache
def load(path: Path = SOURCE) -> dict[str, Any]:
    """The table of claims as it stands in the file; read once."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def results(table: dict[str, Any]) -> dict[str, Result]:
    """All stored results by name; `sources` that are names of groups are these."""
    groups = table["sources"]
    found = {}
    for name, row in table["results"].items():
        sources = [path for part in row["sources"] for path in groups.get(part, [part])]
        found[name] = Result(name, **row | {"sources": tuple(sources)})
    return found


def figure(claim: dict[str, Any], result: Result) -> str:
    """What the claim says of the stored result. Raises whatever its expressions raise."""
    return _text(claim["figure"], result.names(claim.get("let")))


def holds(claim: dict[str, Any], result: Result) -> bool:
    """Whether the stored figure meets the bound; a claim without an expression of one makes none."""
    return bool(eval(claim["holds"], result.names(claim.get("let")))) if "holds" in claim else True


def _text(template: str, names: dict[str, Any]) -> str:
    return eval(f"f'''{template}'''", names)


# ---------------------------------------------------------------- commits


@cache
def changed_lines(commit: str, as_of: str, sources: tuple[str, ...]) -> int | None:
    """Lines added or removed in the files from one commit to the other; None where git cannot tell."""
    git = ["git", "diff", "--numstat", commit.split()[0], as_of, "--", *sources]
    told = subprocess.run(git, cwd=ROOT, capture_output=True, text=True)
    counts = (line.split("\t")[:2] for line in told.stdout.splitlines())
    return None if told.returncode else sum(int(n) for pair in counts for n in pair if n != "-")


def head() -> str:
    """The commit that is checked out; empty where there is no history."""
    told = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return told.stdout.strip()


def made_at(stamps: list[dict], whole: dict[str, Any]) -> str:
    """The commits of a result, and the days on which it was made where it or the `whole` file says them."""
    commits = list(dict.fromkeys(stamp["commit"] for stamp in stamps))
    days = sorted({str(day)[:10] for stamp in stamps if (day := stamp.get("date") or whole.get("date"))})
    more = f" and {len(commits) - 1} more" if len(commits) > 1 else ""
    between = days if len(days) < 2 else [days[0], days[-1]]
    return ", ".join([f"`{commits[0][:7]}`{more}", *([" to ".join(between)] if days else [])])


# ---------------------------------------------------------------- faults


def faults(table: dict[str, Any]) -> list[str]:
    """Whatever is wrong with claims and results, one message each."""
    known = results(table)
    found = [text for result in known.values() for text in _result_faults(result)]
    used = {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.json*")}
    found += [
        f"docs/results/{name}: no result of claims.yaml" for name in sorted(used - {r.file for r in known.values()})
    ]
    for claim in table["measured"]:
        found += _claim_faults(claim, known)
    for claim in table["held"]:
        found += [f"{claim['claim'][:50]}: no {name}" for name in _absent_tests(claim["tests"])]
        found += _long_cells(claim)
    for goal in table.get("unmeasured", []):
        found += [f"{goal['claim'][:50]}: no {key}" for key in ("bound", "missed") if not goal.get(key)]
        found += [f"{goal['claim'][:50]}: no {name}" for name in _absent_tests(goal.get("by", ""))]
        found += _long_cells(goal)
    return found + [text for row in table["mended"] for text in _long_cells(row)]


def _result_faults(result: Result) -> Iterator[str]:
    where = result.where
    try:
        stamps = result.stamps()
    except (OSError, KeyError) as error:
        yield f"{where}: cannot be read: {error!r}"
        return
    if not stamps:
        yield f"{where}: no commit"
    if not result.commands():
        yield f"{where}: no command"
    untold = result.untold()
    if untold and not result.older:
        yield f"{where}: no {' or no '.join(TOLD)} of what was made at {untold[0]['commit'][:7]}"
    if result.older and not untold:
        yield f"{where}: says its {' and '.join(TOLD)}; take `older` out of its row in claims.yaml"
    for commit in sorted({stamp["commit"] for stamp in stamps}):
        if not re.fullmatch(r"[0-9a-f]{7,40}", commit):
            yield f"{where}: made from a tree that no commit names: {commit}"
    if machine := PLACE.search((RESULTS / result.file).read_text()):
        yield f"{where}: names where the repository lay: {machine[0]}"
    for path in result.sources:
        if not (ROOT / path).exists():
            yield f"{where}: depends on {path}, which is not there"


def _claim_faults(claim: dict[str, Any], known: dict[str, Result]) -> Iterator[str]:
    title = claim["claim"][:60]
    if not claim.get("figure") or claim.get("result") not in known:
        yield f"{title}: no figure" if not claim.get("figure") else f"{title}: no result {claim.get('result')}"
        return
    result = known[claim["result"]]
    try:
        text = figure(claim, result)
        met = holds(claim, result)
    except Exception as error:  # an expression may raise anything
        yield f"{title}: {error!r}"
        return
    if "holds" in claim and "bound" not in claim:
        yield f"{title}: a bound that is not said"
    if not met and "missed" not in claim:
        yield f"{title}: {text} does not meet the bound ({claim['bound']}), and no `missed` says why"
    if met and "missed" in claim:
        yield (
            f"{title}: {text} is among the missed goals and meets the bound"
            if "holds" in claim
            else (f"{title}: a missed goal without `holds`")
        )
    yield from _long_cells(claim | {"figure": text})


def _long_cells(row: dict[str, Any]) -> Iterator[str]:
    for key in ("claim", "bound", "figure", "missed", "found", "now", "fault", "must", "lacks"):
        if len(re.sub(r"\]\([^)]*\)", "]", row.get(key, "")).split()) > MOST_WORDS:
            yield f"{row[key][:50]}: more than {MOST_WORDS} words"


def _absent_tests(tests: str) -> list[str]:
    return [name for name in NAMED.findall(tests) if not (ROOT / name).exists()] if tests else ["test or command"]


# ---------------------------------------------------------------- words and tables


@cache
def with_long(name: str) -> str:
    """A test's file, and whether its cases are left out of continuous integration (`long`)."""
    text = (ROOT / name).read_text(encoding="utf-8") if name.startswith("tests/") else ""
    if not LONG.search(text):
        return f"`{name}`"
    tree = ast.parse(text)
    whole = any(isinstance(node, ast.Assign) and "mark.long" in ast.unparse(node)
                and ast.unparse(node.targets[0]) == "pytestmark" for node in tree.body)  # fmt: skip
    if whole:
        return f"`{name}` (long)"
    return f"`{name}` (partly long)" if "mark.long" in ast.unparse(tree) else f"`{name}`"


def shown_by(tests: str) -> str:
    """Names of files as code, each told whether it is long."""
    return NAMED.sub(lambda found: with_long(found[0]), tests)


def figures(table: dict[str, Any], name: str) -> str:
    """A table of figures in Markdown: `each` gives the rows, `cells` are templates over `row`."""
    spec = table["tables"][name]
    names = results(table)[spec["result"]].names(spec.get("let"))
    rows = [[_text(cell, names | {"row": row}) for cell in spec["cells"]] for row in eval(spec["each"], names)]
    return markdown(spec["heads"], rows)


def filled(text: str, table: dict[str, Any]) -> str:
    """A hand-written page with its figures (`<!-- figure RESULT: TEMPLATE -->`) and tables as the results have them."""
    known = results(table)
    text = FIGURE.sub(lambda found: f"{found[1]}{_text(found[3], known[found[2]].names())}{found[5]}", text)
    return TABLE.sub(lambda found: f"{found[1]}{figures(table, found[2])}\n\n{found[4]}", text)


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    """A table; bars in cells are kept from ending them."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)


# ---------------------------------------------------------------- the page


def fault_faults(rows: list[dict[str, Any]], known: dict[str, Result]) -> list[str]:
    """Whatever is wrong with rows of faults.yaml, one message each."""
    found = []
    for row in rows:
        title = row["fault"]
        if not row.get("tests"):
            found.append(f"{title}: no test")
        found += [f"{title}: no {test}" for test in row.get("tests", []) if not is_test(f"tests/{test}")]
        found += [f"{title}: no result {name}" for name in row.get("results", []) if name not in known]
        found += [f"{title}: no {key}" for key in ("fault", "must") if not row.get(key)]
        found += _long_cells(row)
    return found


def is_test(name: str) -> bool:
    """Whether FILE::FUNCTION is a test that is there."""
    file, _, function = name.partition("::")
    return bool(function) and (ROOT / file).is_file() and function in functions(file)


@cache
def functions(file: str) -> dict[str, bool]:
    """The functions of a file at its outermost level, and whether each is wholly marked `long`."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    whole = "(long)" in with_long(file)
    defined = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name: whole or any(_is_long(mark) for mark in node.decorator_list) for node in defined}


def _is_long(mark: ast.expr) -> bool:
    return ast.unparse(mark) in ("pytest.mark.long", "long")


def fault_table(rows: list[dict[str, Any]], known: dict[str, Result]) -> str:
    """Rows of faults.yaml in Markdown."""
    cells = [[str(n), row["fault"], row["must"], _shown_by(row, known)] for n, row in enumerate(rows, 1)]
    return markdown(["", "fault", "must", "shown by"], cells)


def _shown_by(row: dict[str, Any], known: dict[str, Result]) -> str:
    """Tests by their files, stored results, and what nothing shows."""
    by_file: dict[str, list[str]] = {}
    for test in row["tests"]:
        file, _, function = test.partition("::")
        mark = " (long)" if functions(f"tests/{file}")[function] else ""
        by_file.setdefault(file, []).append(f"`{function.removeprefix('test_')}`{mark}")
    shown = [f"{file}: {', '.join(names)}" for file, names in by_file.items()]
    files = [known[name].file for name in row.get("results", [])]
    shown += [f"[{file}](results/{file})" for file in files]
    lacks = f". **Not shown:** {row['lacks']}" if "lacks" in row else ""
    return f"{'; '.join(shown)}{lacks}"


def page() -> str:
    """docs/evidence.md."""
    table = load()
    parts = {
        "held": markdown(["claim", "shown by"], [[row["claim"], shown_by(row["tests"])] for row in table["held"]]),
        "rehearsals": _rehearsals(table),
        "mended": markdown(
            ["found", "now", "test"], [[row["found"], row["now"], shown_by(row["tests"])] for row in table["mended"]]
        ),
        "presets": _presets(table),
        "turns": figures(table, "turns"),
        "faults": fault_table(load(FAULTS)["matrix"], results(table)),
        "bad_input": fault_table(load(FAULTS)["bad_input"], results(table)),
        "golden_cases": f"{sum(golden_cases().values()):,}",
        "differences": markdown(
            ["compared with", "what differs", "who is right", "cases"],
            [
                [row["peer"], row["what"], row["right"], f"{row['cases']} of {golden_cases()[row['topic']]:,}"]
                for row in load(DIFFERENCES)
            ],
        ),
        "measured": _measured(table),
        "missed": _missed(table),
    }
    text = (SOURCE.parent / "evidence.txt").read_text(encoding="utf-8")
    return re.sub(r"\{(\w+)\}", lambda found: parts[found[1]], text)


@cache
def golden_cases() -> dict[str, int]:
    """How many cases of peers' own functions each topic of tests/outside has."""
    files = sorted((OUTSIDE / "golden").glob("*.json.gz"))
    read = {file.name.removesuffix(".json.gz"): json.loads(gzip.decompress(file.read_bytes())) for file in files}
    return {topic: len(written["cases"]) for topic, written in read.items()}


def _measured(table: dict[str, Any]) -> str:
    known = results(table)
    rows = []
    for claim in table["measured"]:
        if "missed" not in claim:
            result = known[claim["result"]]
            rows.append([claim["claim"], claim.get("bound", ""), figure(claim, result), *_origin(result)])
    return markdown(["claim", "bound", "figure", "command, result", "commit, date"], rows)


def _missed(table: dict[str, Any]) -> str:
    known = results(table)
    rows = []
    for claim in table["measured"]:
        if "missed" in claim:
            result = known[claim["result"]]
            cells = [claim["claim"], claim["bound"], figure(claim, result), claim["missed"]]
            rows.append(cells + _origin(result))
    for goal in table["unmeasured"]:
        rows.append([goal["claim"], goal["bound"], "none is stored", goal["missed"], shown_by(goal["by"]), "no result"])
    return markdown(["goal", "bound", "figure", "why", "command, result", "commit, date"], rows)


def _origin(result: Result) -> list[str]:
    """Cells of what made a result, at which commits and when."""
    command = result.command or min(result.commands())
    name = f"`{command.replace('{work}', 'WORK')}`, [{Path(result.file).name}](results/{result.file})"
    return [name, made_at(result.stamps(), result.whole())]


_PARTS = {
    "compute": "computing",
    "tensor": "exchange of tensor parallelism",
    "expert": "exchange of experts",
    "context": "exchange of context parallelism",
    "pipeline": "sends between stages",
    "data": "gradients and weights over replicas",
    "bubble": "waits of the pipeline",
    "host": "the host, a decode step",
    "layers": "the least time of its kernels",
    "exchange": "exchange between workers",
    "reading": "reading weights and caches",
    "prompts": "prompts",
}


def _presets(table: dict[str, Any]) -> str:
    """Each preset's step before and now, beside the planner's best, and what holds it."""
    known = results(table)
    before = known["presets_before"].data()["seconds"]
    rows = []
    for row in sorted(known["presets"].data()["rows"], key=lambda row: row["preset"]):
        name, seconds = row["preset"], row["seconds"]
        longest = max(row["phases"], key=row["phases"].get)
        share = 100 * row["phases"][longest] / seconds
        fast, usual, slow = (f"{rate:,.0f}" for rate in row["tokens_per_s_and_device"])
        was = f"{before[name]:,.0f}" if name in before else ""
        cells = [name, was, f"{seconds:,.0f}", f"{row['best_seconds']:,.0f}", f"{row['over_best']:.2f}"]
        part, of_it = next(iter(row["longest_parts"].items()))
        most = f"{longest.replace('_', '-')}, {share:.0f} %; of that {100 * of_it:.0f} % {_PARTS[part]}"
        rows.append([*cells, f"{slow}, {usual}, {fast}", most])
    heads = [
        "preset",
        "before",
        "now",
        "best",
        "now over best",
        "tokens/s a device: low, expected, high",
        "what holds it",
    ]
    return markdown(heads, rows)


def _rehearsals(table: dict[str, Any]) -> str:
    result = results(table)["rehearsals"]
    rows = []
    for name, found in result.data()["configs"].items():
        lost = ", ".join(f"`{switch.rpartition('.')[2]}`" for switch in found["not_exercised"])
        broke = "".join(f" **broke in {entry['phase']}**" for entry in found["failed"])
        same = f" (the same in small as {found['same_as']})" if "same_as" in found else ""
        given = "".join(f" (with `--set {key}={value}`)" for key, value in found.get("given", {}).items())
        sizes = f"{found.get('ranks', '')}, {found.get('engine_workers', '')}"
        cells = [f"{name}{given}{same}{broke}", f"{found['seconds']:.0f}", sizes, str(len(found["exercised"])), lost]
        rows.append([*cells, made_at([found], result.whole())])
    heads = ["configuration", "seconds", "ranks, engine workers", "exercised", "not exercised", "commit, date"]
    return markdown(heads, rows)
