"""Results that swebench reads from logs of pytest, and whether it counts an instance as resolved by them."""

import random
from types import SimpleNamespace

from swebench.harness.constants import FAIL_TO_PASS, PASS_TO_PASS, ResolvedStatus
from swebench.harness.grading import get_eval_tests_report, get_resolution_status
from swebench.harness.log_parsers import PARSER_REGISTRY

PEERS = ("swebench",)
PARSERS = sorted(name for name in PARSER_REGISTRY if "pytest" in name)
STATUSES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL")
PARAMETERS = (
    "", "", "[1]", "[a b]", "[a c]", "[x-y]", "[x - y]", "[log(photon / s)]", "[/etc/x]", "[//a/b]", "[a[0]]", "[-- a]",
)  # fmt: skip
NOISE = (
    "============ short test summary info ============",
    "SKIPPED [1] tests/test_a.py:3: no network",
    "collected 3 items",
    "tests/test_a.py .F.                 [100%]",
    "E       AssertionError: PASSED is not FAILED",
    "",
)


def cases() -> list[dict]:
    draw = random.Random(23)
    return [_case(draw, parser) for parser in PARSERS for _ in range(600)]


def _case(draw: random.Random, parser: str) -> dict:
    names = [_name(draw) for _ in range(draw.randint(2, 6))]
    read = PARSER_REGISTRY[parser]
    spec = SimpleNamespace()
    gold = list(read(_log(draw, dict.fromkeys(names, "PASSED")), spec))
    expected = draw.sample(gold, draw.randint(1, len(gold)))
    if draw.random() < 0.2:  # as 676 names of Verified are
        expected = [_cut(draw, name) for name in expected]
    border = draw.randint(1, len(expected))
    fail, keep = expected[:border], expected[border:]
    weights = (draw.choice([2, 30, 100]), 1, 1, 1, 2)
    said = {name: draw.choices(STATUSES, weights)[0] for name in names if draw.random() < 0.97}
    log = _log(draw, said)
    found = read(log, spec)
    report = get_eval_tests_report(found, {FAIL_TO_PASS: fail, PASS_TO_PASS: keep})
    return {
        "parser": parser, "log": log, "fail_to_pass": fail, "pass_to_pass": keep, "found": found,
        "resolved": get_resolution_status(report) == ResolvedStatus.FULL.value,
    }  # fmt: skip


def _name(draw: random.Random) -> str:
    middle = draw.choice(["", "", "TestA::", "TestB::TestC::"])
    return f"tests/test_{draw.choice('abc')}.py::{middle}test_{draw.choice('uvwxyz')}{draw.choice(PARAMETERS)}"


def _cut(draw: random.Random, name: str) -> str:
    at = name.find("[")
    return name if at < 0 else name[: draw.randint(at + 1, len(name))]


def _log(draw: random.Random, said: dict[str, str]) -> str:
    lines = []
    for name, status in said.items():
        why = draw.choice(["", " - AssertionError: 1 != 2", " - E - F"]) if status in ("FAILED", "ERROR") else ""
        lines += [*draw.choices(NOISE, k=draw.randint(0, 1)), f"{status} {name}{why}"]
    return "\n".join(lines) + "\n"
