"""Reads tasks of others' data sets as rows: SWE-bench, R2E-Gym and Harbor.

What each of them counts as solved is kept: of SWE-bench every test of FAIL_TO_PASS and PASS_TO_PASS passes (an expected
failure counts, and of the latter one that is skipped), of R2E-Gym every test ends as `expected_output_json` says, of
Harbor the number that its tests write. Checked against swebench 5.0.2, R2E-Gym at 0277f10b and harbor 0.26.0.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mrl.acting.sandboxes.tasks import OWN, TASK

TESTBED = "/testbed"
_HARBOR_LOGS = "/logs"
_HARBOR_TESTS = "/tests"
_LARGEST = 16 * 2**20  # bytes of a file of tests


def swe_bench(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of a row of SWE-bench's, as its package 5 reads them. Raises ValueError for what is missing.

    Rows without `eval_script` and `image` are of an earlier form, of which the package alone knows the tests.
    """
    for name in ("image", "eval_script", "FAIL_TO_PASS", "problem_statement"):
        if not row.get(name):
            raise ValueError(f"the row of SWE-bench has no {name}; rows of the package swebench 5 have")
    parser = row.get("log_parser") or ""
    if "pytest" not in parser:
        raise ValueError(f"results of the parser {parser!r} are not read here; those of pytest are")
    if row.get("eval_type", "pass_and_fail") != "pass_and_fail":
        raise ValueError(f"tests of the kind {row['eval_type']!r} are not read here; those that pass and fail are")
    mended = dict.fromkeys(_listed(row["FAIL_TO_PASS"]), "PASSED|XFAIL")
    kept = dict.fromkeys(_listed(row.get("PASS_TO_PASS") or []), "PASSED|XFAIL|SKIPPED")
    changed = [line[6:].strip() for line in (row.get("test_patch") or "").splitlines() if line.startswith("+++ b/")]
    script = row["eval_script"]
    if not isinstance(script, str):
        script = "\n".join(script)
    task = {
        "image": row["image"],
        "folder": TESTBED,
        "test": f"bash -c {_quoted(script)}",
        "own": [*changed, *(pattern for pattern in OWN if "test" not in pattern or "conftest" in pattern)],
        "expected": kept | mended,
    }
    return _row("swe-bench", row["problem_statement"], task, {"instance_id": row.get("instance_id", "")})


def r2e_gym(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of a row of R2E-Gym's. Raises ValueError for what is missing."""
    for name in ("docker_image", "expected_output_json", "problem_statement"):
        if not row.get(name):
            raise ValueError(f"the row of R2E-Gym has no {name}")
    expected = row["expected_output_json"]
    if isinstance(expected, str):
        expected = json.loads(expected)
    statement = row["problem_statement"]
    _, begins, rest = statement.partition("[ISSUE]")
    if begins:
        statement = rest.partition("[/ISSUE]")[0]
    task = {
        "image": row["docker_image"],
        "folder": TESTBED,
        # the tests lie beside the repository, and are reached from it while they run
        "test": "rm -rf r2e_tests && ln -s /r2e_tests r2e_tests && bash run_tests.sh",
        "hidden": ["/r2e_tests"],
        "own": [*OWN, "r2e_tests", "r2e_tests/*"],
        "expected": {name.split(" - ")[0]: status for name, status in expected.items()},
    }
    return _row("r2e-gym", statement.strip(), task, {"repo_name": row.get("repo_name", "")})


def harbor(folder: Path, image: str | None = None) -> dict[str, Any]:
    """Returns a row of a folder of Harbor's. `image`: of a task that names none, because it has a Dockerfile to build.

    Raises ValueError for a folder that is none, has several steps, or tests in a language of Windows.
    """
    try:
        given = tomllib.loads((folder / "task.toml").read_text())
        statement = (folder / "instruction.md").read_text()
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is no task of Harbor's: {error}") from error
    if given.get("steps"):
        raise ValueError(f"{folder} has several steps; a response has one task")
    environment = given.get("environment", {})
    image = environment.get("docker_image") or image
    if image is None:
        raise ValueError(f"{folder} names no docker_image; build its environment/Dockerfile and give the image's name")
    tests = dict(_texts(folder / "tests"))
    if f"{_HARBOR_TESTS}/test.sh" not in tests:
        raise ValueError(f"{folder} has no tests/test.sh")
    task = {
        "image": image,
        "folder": environment.get("workdir") or "/app",
        "test": f"mkdir -p {_HARBOR_LOGS}/verifier && bash {_HARBOR_TESTS}/test.sh",
        "tests": tests,
        "places": [_HARBOR_TESTS, _HARBOR_LOGS],
        "reward_file": f"{_HARBOR_LOGS}/verifier/reward.txt",
    }
    return _row("harbor", statement.strip(), task, {"name": folder.name})


def _texts(folder: Path) -> Iterator[tuple[str, str]]:
    """Yields files of a folder as they stand under /tests. Raises ValueError for one that is no text or too long."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"{path} has more than {_LARGEST} bytes")
        try:
            yield f"{_HARBOR_TESTS}/{path.relative_to(folder)}", path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is no text: {error}") from error


def _listed(names: Any) -> list[str]:
    """Returns names of tests, which may be written as JSON."""
    if isinstance(names, str):
        return list(json.loads(names))
    return list(names)


def _quoted(script: str) -> str:
    return "'" + script.replace("'", "'\\''") + "'"


def _row(source: str, statement: str, task: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of verl's schema. Mappings are JSON, so that rows with different tests can share a file."""
    task = {name: json.dumps(value) if isinstance(value, dict) else value for name, value in task.items()}
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": statement}],
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {TASK: task, **more},
    }
