"""What bash passes to verl from its public launch scripts, and what `mrl import-verl` reads of them.

    python scripts/evidence/verl_scripts.py volcengine/verl=CLONE verl-project/verl-recipe=CLONE
    python scripts/evidence/verl_scripts.py volcengine/verl=CLONE --rehearse examples/sglang_multiturn [--set ...]

Every script is run by bash itself, over stubs: python, ray and whatever else it calls only write down their arguments.
It runs in namespaces of its own (util-linux's unshare), without a network and on a file system that nothing can be
written to. Our reader is not part of that. Its answer is then compared word by word, and three things are written:
tests/unit/verl_passed.jsonl, the key=value pairs that bash passes of some scripts, which tests import;
docs/results/verl_scripts.json, the counts and the verdict on every script, from which docs/from_verl.md has its table.
Verdicts on scripts with adapters, a critic or a teacher stand beside those of a commit before mrl had these.

`--rehearse` runs what is imported of the scripts below a folder, or of one, by `mrl rehearse`: a step, a save, a resume
and a step of a small copy, with the tools that the script names. `--set` is handed to `mrl import-verl`. Each script's
outcome goes to docs/results/verl_rehearsals.json as soon as it is there. Exit code 1 where one that imports is not
rehearsed.
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

from stamp import changes, facts

from mrl.cli.import_verl import _checked
from mrl.errors import MrlError
from mrl.tools.import_verl.shell import read_script
from mrl.tools.import_verl.translate import translate
from mrl.tools.import_verl.verl_command import from_script, hydra_value

ROOT = Path(__file__).resolve().parents[2]
PASSED, RESULTS = ROOT / "tests" / "unit" / "verl_passed.jsonl", ROOT / "docs" / "results" / "verl_scripts.json"
REHEARSED = ROOT / "docs" / "results" / "verl_rehearsals.json"
HOME = "/home/user"
STUBS = "python python3 ray torchrun nohup env sudo srun timeout rm mkdir cp mv tee pip pip3 git wget curl sleep"
TOOLS = "basename dirname realpath readlink seq expr tr cut sed awk head tail cat grep sort uniq wc"
RECORD = 'printf "%s\\0" "$#" "$@" >&9'
ENTRY = re.compile(r"(^|[./])(\w*main_\w+|\w+_main)(\.py)?$")
PAIR = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
LIMIT_S = 20  # for a script
BEFORE = "cc759673"  # had neither adapters nor a critic nor a teacher, and stored its verdicts
TRAINERS = ("main_ppo", "main_dapo")  # parts of the entry's name; verl's advantage is gae where none is given
KEPT = 80  # scripts whose pairs are kept as data, beside all that generate ahead of training


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", nargs="+", metavar="REPOSITORY=CLONE")
    parser.add_argument("--rehearse", metavar="PATH", help="a script or a folder of them, below the clones")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="given", help="of the import")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "verl", help="folder of rehearsals")
    options = parser.parse_args()
    clones = {name: Path(clone).resolve() for name, clone in (text.split("=", 1) for text in options.clones)}
    if options.rehearse:
        went = list(_rehearsals(clones, options.rehearse, options.given, options.work))
        print(f"{went.count(True)} of {len(went)} that import are rehearsed")
        return int(not all(went))
    _compare_all(clones)
    return 0


def _compare_all(clones: dict[str, Path]) -> None:
    rows = [row for name, folder in clones.items() for row in _of_clone(name, folder)]
    kept = _kept(rows)
    PASSED.write_text("".join(json.dumps({k: row[k] for k in _DATA}) + "\n" for row in kept))
    counts = Counter()
    for row in rows:
        counts.update(row["counts"])
    commits = {row["repository"]: row["commit"] for row in rows}
    scripts = [{key: row[key] for key in ("repository", "path", "verdict", "why")} for row in rows]
    found = facts("python scripts/evidence/verl_scripts.py") | {"commits": commits, "ways": _ways(rows)}
    RESULTS.write_text(json.dumps(found | {"counts": counts, "scripts": scripts}, indent=1) + "\n")
    print(dict(counts))


def _ways(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Verdicts on the scripts of each way to train, now and at BEFORE; `all`: on every script."""
    stored = subprocess.run(["git", "show", f"{BEFORE}:{RESULTS.relative_to(ROOT)}"], cwd=ROOT, capture_output=True)
    before = {(row["repository"], row["path"]): row["verdict"] for row in json.loads(stored.stdout)["scripts"]}
    found = {}
    for way in ("all", "adapters", "critic", "teacher"):
        those = [row for row in rows if way == "all" or way in ways_of(row["entry"], row["words"])]
        found[way] = {
            "scripts": len(those),
            "before": Counter(before.get((row["repository"], row["path"]), "absent") for row in those),
            "now": Counter(row["verdict"] for row in those),
        }
    return {"commit_before": BEFORE, "verdicts": found}


def ways_of(entry: str, words: list[str]) -> set[str]:
    """What a script trains beside all weights by rewards, or in their place, from the pairs that it passes."""
    said = {match[2]: match[3].strip("'\"") for word in words if (match := PAIR.fullmatch(word)) and match[1] != "~"}
    found = set()
    ranks = (said.get(f"actor_rollout_ref.model.{key}", "0") for key in ("lora_rank", "lora.rank"))
    if any(rank not in ("0", "", "null") for rank in ranks):
        found.add("adapters")
    if any(name in entry for name in TRAINERS) and said.get("algorithm.adv_estimator", "gae") == "gae":
        found.add("critic")
    if said.get("distillation.enabled", "").lower() == "true":
        found.add("teacher")
    return found


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


# ---------------------------------------------------------------- in small


def _rehearsals(clones: dict[str, Path], path: str, given: list[str], work: Path) -> Iterator[bool]:
    """Whether a rehearsal went well, of each script that imports; outcomes are printed and stored."""
    command = f"scripts/evidence/verl_scripts.py --rehearse {' --set '.join((path, *given))}"
    for name, clone in clones.items():
        for file in sorted(clone.glob(path if path.endswith(".sh") else f"{path}/**/*.sh")):
            script = str(file.relative_to(clone))
            folder = work / name / script.removesuffix(".sh")
            folder.mkdir(parents=True, exist_ok=True)
            outcome = _imported(file, clone, given, folder)
            if outcome["imports"]:
                outcome |= _rehearsed(folder)
                yield outcome["ok"]
            outcome["words"] = outcome["words"].replace(str(clone), HOME)
            print(f"{script}: {outcome['words']}", flush=True)
            if changed := changes():
                print(f"not stored, results name a commit:\n{changed}", file=sys.stderr)
            else:
                of_clone = {"repository": name, "script": script, "given": given, "clone": _commit(clone)}
                _store(f"{name}/{script}", facts(command) | of_clone | outcome)


def _imported(file: Path, clone: Path, given: list[str], folder: Path) -> dict[str, Any]:
    """What `mrl import-verl` says of a script; its configuration lies in the folder then."""
    known = [f"{name}={value}" for name, value in _known(file.read_text(encoding="utf-8"), clone).items()]
    settings = [word for text in (*known, *given) for word in ("--set", text)]
    written = ("-o", str(folder / "imported.yaml"))
    done = _mrl("import-verl", str(file), *settings, "--json", "--accept-losses", *written)
    if not done.stdout.strip():
        return {"imports": False, "words": f"not imported: {done.stderr.strip()[-300:]}"}
    said = json.loads(done.stdout.splitlines()[-1])
    if not said["ok"]:
        why = [f"{each['field']}: {each['rule']}" for each in said["violations"]] or said["warnings"]
        return {"imports": False, "words": f"not imported: {'; '.join(why)}"}
    lost = [each["key"] for kind in ("unsupported", "unknown") for each in said[kind]]
    return {"imports": True, "verdict": said["verdict"], "lost": lost}


def _rehearsed(folder: Path) -> dict[str, Any]:
    """What `mrl rehearse` says of a folder's configuration, and that in words."""
    done = _mrl("rehearse", str(folder / "imported.yaml"), "--work", str(folder / "rehearsal"), "--json")
    (folder / "rehearsal.log").write_text(done.stdout + done.stderr)
    if not done.stdout.strip():
        return {"ok": False, "words": f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"}
    said = json.loads(done.stdout.splitlines()[-1])
    with_tools = any(each["switch"] == "rollout.turns" for each in said["exercised"])
    words = f"rehearsed in {said['seconds']:.0f} s, {'with its tools' if with_tools else 'without tools'}"
    if not said["ok"]:
        words = "; ".join(f"{each['phase']}: {each['why']}" for each in said["failed"])
    return {"ok": said["ok"], "seconds": said["seconds"], "with_tools": with_tools, "words": words}


def _mrl(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", "from mrl.cli.main import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def _store(script: str, outcome: dict[str, Any]) -> None:
    stored = json.loads(REHEARSED.read_text(encoding="utf-8")) if REHEARSED.exists() else {}
    stored[script] = outcome
    REHEARSED.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n", encoding="utf-8")


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
