"""Rehearses presets and imported verl scripts, one after the other, and keeps what each came to.

    scripts/evidence/rehearsals.sh [NAME ...]    presets by MODEL/CLUSTER, scripts by name; none: all that are stale
    scripts/evidence/rehearsals.sh --headers     the presets' headers; runs nothing

Results go to docs/results/rehearsals.json after each rehearsal, so that what was interrupted goes on with the next
name. A result names the commit of the code that ran; one of code with changes is not stored.
"""

import argparse
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from stamp import facts

from mrl.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "rehearsals.json"
PRESETS = ROOT / "parallel_configs"
SCRIPTS = ROOT / "tests" / "unit" / "verl_scripts"
COMMAND = "scripts/evidence/rehearsals.sh"
CODE = ("mrl", "parallel_configs", "setup.py")  # what a rehearsal runs
HEADER = "# Rehearsed with `mrl rehearse` at commit "
# shell variables that a script takes from its environment: where files lie,
FILES = dict.fromkeys(("train_files", "test_files", "TRAIN", "DATA_ROOT", "SAVE_DIR"), "data/train.parquet")
LEGAL = {"NNODES": "4"}  # and what makes a script legal: source 004's Megatron layout needs a multiple of 32 devices
VARIABLES = FILES | LEGAL


@dataclass(frozen=True)
class Config:
    """A preset, or a verl script that is imported first."""

    name: str
    file: Path

    @property
    def is_script(self) -> bool:
        return self.file.suffix == ".sh"


def configs() -> dict[str, Config]:
    """All that can be rehearsed, by name: presets first."""
    presets = [Config(f"{p.parent.name}/{p.stem}", p) for p in sorted(PRESETS.glob("*/*.yaml"))]
    imported = [Config(p.stem, p) for p in sorted(SCRIPTS.glob("*.sh"))]
    return {config.name: config for config in (*presets, *imported)}


def stored() -> dict[str, dict]:
    """Results by name."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))["configs"] if RESULTS.exists() else {}


def store(name: str, result: dict) -> None:
    """Puts one result beside the others'."""
    found = stored() | {name: result}
    RESULTS.write_text(
        json.dumps({"command": COMMAND, "configs": dict(sorted(found.items()))}, indent=1) + "\n", encoding="utf-8"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--headers", action="store_true")
    options = parser.parse_args()
    known, found = configs(), stored()
    if unknown := set(options.names) - known.keys():
        parser.error(f"nothing is named {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    at, failed = commit(), 0
    for name in () if options.headers else options.names or [n for n in known if is_stale(found.get(n), at)]:
        result = rehearse(known[name]) | _told(at)
        print(f"{name}: {'ok' if result['ok'] else result['failed']} {result['seconds']:.0f} s", flush=True)
        failed += not result["ok"]
        if "changes" not in at:
            store(name, result)
    write_headers()
    return min(failed, 1)


def is_stale(result: dict | None, at: str) -> bool:
    """Whether there is no good result of this commit's code."""
    return (
        result is None
        or not result["ok"]
        or bool(_git("diff", "--name-only", result["commit"], at.split()[0], "--", "mrl"))
    )


def rehearse(config: Config) -> dict:
    """What is kept of one rehearsal."""
    with TemporaryDirectory(prefix="rehearsal-") as folder:
        file = imported(config, Path(folder)) if config.is_script else config.file
        done = _run("rehearse", str(file), "--json", "--work", f"{folder}/work", *own_reward(config, file))
        answer = json.loads(done.stdout.splitlines()[-1])
    kept = {
        key: answer[key]
        for key in ("ok", "seconds", "ranks", "engine_workers", "factor", "phases", "stand_ins")
        if key in answer
    }
    own = {"given": given_to(config.file)} if config.is_script else {}
    return (
        kept
        | own
        | {
            "exercised": [entry["switch"] for entry in answer["exercised"]],
            "not_exercised": {entry["switch"]: entry["why"] for entry in answer["not_exercised"]},
            "failed": [{"phase": entry["phase"], "why": entry["why"]} for entry in answer["failed"]],
        }
    )


def own_reward(config: Config, file: Path) -> list[str]:
    """`--set` for a script's reward file: the one of that name beside the script, or beside those of the tests."""
    custom = load_config(file).config.reward.custom_reward_function if config.is_script else None
    folders = (config.file.parent, SCRIPTS) if custom else ()
    found = [folder / Path(custom.path).name for folder in folders if (folder / Path(custom.path).name).is_file()]
    return ["--set", f"reward.custom_reward_function.path={found[0]}"] if found else []


def given_to(script: Path) -> dict[str, str]:
    """What a script is given in place of a value of its own, so that it is legal."""
    text = script.read_text(encoding="utf-8")
    return {name: value for name, value in LEGAL.items() if re.search(rf"\$\{{{name}:-", text)}


def imported(config: Config, folder: Path) -> Path:
    """The configuration that a script is imported to."""
    file = folder / f"{config.name}.yaml"
    given = [text for name, value in VARIABLES.items() for text in ("--set", f"{name}={value}")]
    done = _run("import-verl", str(config.file), "-o", str(file), *given)
    if not file.exists():
        raise SystemExit(f"{config.name} could not be imported:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return file


def _run(*arguments: str) -> subprocess.CompletedProcess:
    program = "from mrl.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=None, text=True
    )
    if not done.stdout.strip():
        raise SystemExit(f"mrl {arguments[0]} said nothing and ended with {done.returncode}")
    return done


# ---------------------------------------------------------------- what is written of it


def write_headers() -> None:
    """A line in the header of every preset that has a good result."""
    for name, result in stored().items():
        file = PRESETS / f"{name}.yaml"
        if result["ok"] and file.exists():
            file.write_text(with_header(file.read_text(encoding="utf-8"), result["commit"]), encoding="utf-8")


def with_header(text: str, at: str) -> str:
    """A preset's text with the line behind the comments that it begins with; one that is there is replaced."""
    lines = [line for line in text.splitlines() if not line.startswith(HEADER)]
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join([*lines[:end], f"{HEADER}{at}: in small, on two CPU cores.", *lines[end:], ""])


def commit() -> str:
    """The commit of the code that runs; marked where files differ from it by more than a comment."""
    head = _git("rev-parse", "HEAD")
    changed = [
        line
        for line in _git("diff", "-U0", "HEAD", "--", *CODE).splitlines()
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    return f"{head} with changes" if any(not line[1:].startswith("#") for line in changed) else head


def _told(at: str) -> dict:
    return facts("scripts/evidence/rehearsals.sh") | {"commit": at}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
