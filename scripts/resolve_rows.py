"""Can the rows of setup.py be installed? Asks the package index: `python scripts/resolve_rows.py [ROW ...]`, a minute,
installs nothing.

uv resolves each row for the platform that it is meant for, as pip would: every requirement of every package at once.
What is built from sources or comes from a vendor's own index is taken to be there, and its requirements, in
scripts/built_from_source.json, are resolved with the rest. Writes what came out into docs/results/rows.json;
tests/unit/test_rows.py holds the pins to it, and a long test asks again.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts" / "evidence"))
from stamp import facts  # noqa: E402

RESULTS = ROOT / "docs" / "results" / "rows.json"
BUILT = ROOT / "scripts" / "built_from_source.json"
# row -> extra of setup.py, Python and platform
PLATFORMS = {
    "cpu": ("cpu", "3.11", "x86_64-manylinux_2_34"),
    "cuda": ("cuda", "3.12", "x86_64-manylinux_2_34"),
    "npu": ("npu", "3.12", "aarch64-manylinux_2_34"),
    "npu-x86": ("npu", "3.12", "x86_64-manylinux_2_34"),
}


class Unresolved(RuntimeError):
    """The row's requirements contradict each other, or the index was not reached; says what uv said."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help=f"of {', '.join(PLATFORMS)}; all of them if none is named"
    )
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for row in parser.parse_args().rows or PLATFORMS:
        results[row] = facts("python scripts/resolve_rows.py") | resolve(row)
        print(f"{row}: {len(results[row]['packages'])} packages")
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    return 0


def requirements(row: str) -> list[str]:
    """What setup.py asks for with the row's extra, core packages included."""
    pinned: dict = {"__file__": str(ROOT / "setup.py")}
    source = (ROOT / "setup.py").read_text().partition("\nsetup(")[0]
    exec(compile(source, "setup.py", "exec"), pinned)
    return [*pinned["CORE"], *pinned["EXTRAS"][PLATFORMS[row][0]]]


def built(row: str) -> dict[str, dict]:
    """Requirement -> how it is had, and what it requires in turn; `instead`:
    the index has a build that stands in for it.
    """
    return json.loads(BUILT.read_text()).get(row, {})


def _override(requirement: str, part: dict) -> str:
    """What uv is to take wherever the package is asked for: this, or nothing at all."""
    return requirement if part.get("instead") else f"{_name(requirement)}; sys_platform == 'never'"


def resolve(row: str, also: list[str] | None = None) -> dict:
    """What would be installed, by name. `also`: further requirements. Raises Unresolved."""
    _, python, platform = PLATFORMS[row]
    asked = [*requirements(row), *(also or [])]
    wanted = [*asked, *(r for part in built(row).values() for r in part["requires"])]
    with TemporaryDirectory() as folder:
        ours, theirs = Path(folder, "requirements.in"), Path(folder, "overrides.txt")
        ours.write_text("\n".join(wanted))
        theirs.write_text("\n".join(_override(*part) for part in built(row).items()))
        out = _uv(
            "pip",
            "compile",
            str(ours),
            "--overrides",
            str(theirs),
            "--python-version",
            python,
            "--python-platform",
            platform,
        )
    packages = dict(re.findall(r"^([a-z0-9][a-z0-9._-]*)==([^\s;]+)", out, flags=re.MULTILINE))
    return {
        "date": date.today().isoformat(), "python": python, "platform": platform, "requirements": sorted(asked),
        "built": sorted(built(row)), "packages": packages,
    }  # fmt: skip


def _uv(*arguments: str) -> str:
    tool = shutil.which("uv") or sys.exit("uv is part of the dev extra; install it to run this")
    options = ("--quiet", "--no-config", "--no-annotate", "--no-header", "--no-python-downloads")
    done = subprocess.run([tool, *arguments, *options], capture_output=True, text=True, timeout=540)
    if done.returncode:
        raise Unresolved(done.stderr)
    return done.stdout


def _name(requirement: str) -> str:
    return re.split(r"[=<>\[; ]", requirement)[0]


if __name__ == "__main__":
    sys.exit(main())
