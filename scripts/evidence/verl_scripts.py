"""What bash passes to verl from its public launch scripts, and what `mrl import-verl` reads of them.

    python scripts/evidence/verl_scripts.py volcengine/verl=CLONE verl-project/verl-recipe=CLONE

Every script is run by bash itself, over stubs: python, ray and whatever else it calls only write down their arguments.
It runs in namespaces of its own (util-linux's unshare), without a network and on a file system that nothing can be
written to. Our reader is not part of that. Its answer is then compared word by word, and three things are written:
tests/unit/verl_passed.jsonl, the key=value pairs that bash passes of some scripts, which tests import;
docs/results/verl_scripts.json, the counts and the verdict on every script, from which docs/from_verl.md has its table.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stamp import facts, with_rows

from mrl.cli.import_verl import _checked
from mrl.errors import MrlError
from mrl.tools.import_verl.shell import read_script
from mrl.tools.import_verl.translate import translate
from mrl.tools.import_verl.verl_command import from_script, hydra_value

ROOT = Path(__file__).resolve().parents[2]
PASSED, RESULTS = ROOT / "tests" / "unit" / "verl_passed.jsonl", ROOT / "docs" / "results" / "verl_scripts.json"
HOME = "/home/user"
STUBS = "python python3 ray torchrun nohup env sudo srun timeout rm mkdir cp mv tee pip pip3 git wget curl sleep"
TOOLS = "basename dirname realpath readlink seq expr tr cut sed awk head tail cat grep sort uniq wc"
RECORD = 'printf "%s\\0" "$#" "$@" >&9'
ENTRY = re.compile(r"(^|[./])(\w*main_\w+|\w+_main)(\.py)?$")
PAIR = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
LIMIT_S = 20  # for a script
KEPT = 80  # scripts whose pairs are kept as data, beside all that generate ahead of training


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", nargs="+", metavar="REPOSITORY=CLONE")
    options = parser.parse_args()
    clones = {name: Path(clone).resolve() for name, clone in (text.split("=", 1) for text in options.clones)}
    rows = [row for name, folder in clones.items() for row in _of_clone(name, folder)]
    kept = _kept(rows)
    PASSED.write_text("".join(json.dumps({k: row[k] for k in _DATA}) + "\n" for row in kept))
    counts = Counter()
    for row in rows:
        counts.update(row["counts"])
    commits = {row["repository"]: row["commit"] for row in rows}
    scripts = [{key: row[key] for key in ("repository", "path", "verdict", "why")} for row in rows]
    found = facts("python scripts/evidence/verl_scripts.py") | {"commits": commits}
    RESULTS.write_text(with_rows(found | {"counts": counts}, "scripts", scripts))
    print(dict(counts))
    return 0


_DATA = ("repository", "commit", "path", "entry", "options", "words")


def _of_clone(name: str, clone: Path) -> Iterator[dict[str, Any]]:
    commit = _commit(clone)
    for file in sorted(clone.rglob("*.sh")):
        if command := _launch(_passed(file, clone)):
            at = next(i for i, word in enumerate(command) if ENTRY.search(word))
            row = {"repository": name, "commit": commit, "path": str(file.relative_to(clone)), "entry": command[at]}
            passed = [word for word in command[at + 1 :] if PAIR.fullmatch(word)]
            row["words"] = [word.replace(str(clone), HOME) for word in passed]
            row["options"] = [w.replace(str(clone), HOME) for w in command[at + 1 :] if not PAIR.fullmatch(w)]
            judged = _compared(file, passed, clone)
            why = judged["why"].replace(str(clone), HOME).replace(str(Path.cwd()), HOME)
            yield row | judged | {"why": why}


def _commit(repository: Path) -> str:
    said = subprocess.run(["git", "-C", repository, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return said.stdout.strip()


def _passed(script: Path, clone: Path) -> list[list[str]]:
    """Every command that the script calls, in order, with its arguments."""
    read, write = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        _make_stubs(Path(folder))
        handler = f"command_not_found_handle() {{ {RECORD}; }}; export -f command_not_found_handle"
        inside = f'mount -o remount,bind,ro / ; PATH={folder}; cd {clone} && {handler}; exec bash --norc "$0"'
        limit = ["timeout", "-k", "1", str(LIMIT_S)]  # some wait for servers that no stub starts
        apart = ["unshare", "-r", "-m", "-n", "--propagation", "private"]
        command = [*limit, *apart, "bash", "--norc", "-c", inside, str(script)]
        process = subprocess.Popen(
            ["bash", "-c", f'exec 9>&{write}; exec "$@"', "-", *command], pass_fds=[write], stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={"PATH": "/usr/bin:/bin", "HOME": HOME},
        )  # fmt: skip
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            words = pipe.read().decode(errors="replace").split("\0")
        process.wait(60)
    return list(_commands(words))


def _commands(words: list[str]) -> Iterator[list[str]]:
    at = 0
    while at < len(words) - 1:
        count = int(words[at])
        yield words[at + 1 : at + 1 + count]
        at += 1 + count


def _make_stubs(folder: Path) -> None:
    for name in STUBS.split():
        # tee runs beside the command whose words it would be written between; a script that asks finds no NPU
        body = "" if name == "tee" else f'[[ "$*" == *"import torch_npu"* ]] && exit 1\nset -- {name} "$@"; {RECORD}\n'
        (folder / name).write_text(f"#!/bin/bash\n{body}")
    (folder / "date").write_text("#!/bin/bash\necho 20260102\n")
    for file in folder.iterdir():
        file.chmod(0o755)
    for name in (*TOOLS.split(), "bash"):
        (folder / name).symlink_to(f"/usr/bin/{name}")


def _launch(commands: list[list[str]]) -> list[str] | None:
    """The last command that starts one of verl's trainers with overrides."""
    found = [c for c in commands if any(map(ENTRY.search, c)) and sum(bool(PAIR.fullmatch(word)) for word in c) > 2]
    return found[-1] if found else None


# ---------------------------------------------------------------- our reader beside it


def _known(text: str, clone: Path) -> dict[str, str]:
    """What a user says of a script: where it is started, if it asks for that to find files of verl's."""
    known = {"HOME": HOME}
    if 'PROJECT_DIR="$(pwd)"' in text:
        known["PROJECT_DIR"] = str(clone)
    return known


def _compared(file: Path, words: list[str], clone: Path) -> dict[str, Any]:
    text = file.read_text(encoding="utf-8")
    try:
        command = from_script(read_script(text, str(file), _known(text, clone)), str(file))
    except MrlError as error:
        return {"counts": {"refused": 1}, "verdict": "refused", "why": str(error).partition(": ")[2]}
    counts = Counter(_judged(command, words)) | Counter({"scripts": 1})
    try:
        imported = translate(command, str(file))
    except MrlError as error:
        return {"counts": counts, "verdict": "refused", "why": str(error).partition(": ")[2]}
    violations, _ = _checked(None, imported.to_yaml())
    why = [*imported.faults, *(f"{v.field}: {v.rule}" for v in violations)] or [e.key for e in imported.losses]
    verdict = "refused" if violations or imported.faults else "carried with losses" if imported.losses else "valid"
    return {"counts": counts, "verdict": verdict, "why": "; ".join(dict.fromkeys(why))}


def _judged(command, words: list[str]) -> Iterator[str]:
    """For every key that bash passes, or that only our reader found, what became of it."""
    passed = {match[2]: match[3] for word in words if (match := PAIR.fullmatch(word)) and match[1] != "~"}
    read = {override.key: override for override in command.overrides if override.line}
    told = " ".join((*command.faults, *command.remarks))
    for key, text in passed.items():
        if key not in read:
            yield "absent, told" if command.faults or key in told else "LOST"
        elif read[key].missing:
            yield "unknown, told"
        else:
            same = read[key].value == hydra_value(text)
            yield "same" if same else "different, told" if key in told else "DIFFERENT"
    for key in read.keys() - passed.keys():
        yield "more than bash, told" if "the shell ends the command there" in told or read[key].missing else "MORE"


def _kept(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that generate ahead, and of the others those that add most keys and values to what is there."""
    kept = [row for row in rows if "async" in row["entry"] or "one_step" in row["entry"]]
    seen = {word for row in kept for word in row["words"]}
    rest = [row for row in rows if row not in kept and "scripts" in row["counts"]]
    while rest and len(kept) < KEPT:
        best = max(rest, key=lambda row: len({*row["words"]} - seen))
        kept.append(best)
        rest.remove(best)
        seen |= {*best["words"]}
    return sorted(kept, key=lambda row: (row["repository"], row["path"]))


if __name__ == "__main__":
    sys.exit(main())
