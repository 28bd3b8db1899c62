"""The reference pages are what the schema and the tables say now."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.config.schema import ModelConfig, schema_keys
from mrl.record.spec import all_metrics

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "scripts" / "generate_docs.py")
docs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(docs)


ELSEWHERE = "predictions"  # its figures take seconds, and test_predictions has them


@pytest.fixture(scope="module")
def checked() -> list[str]:
    """What the script says of all pages, and which heavy packages it imports for that: one line each."""
    program = (
        "import sys, runpy\nsys.argv = ['generate_docs.py', '--check']\n"
        f"docs = runpy.run_path('scripts/generate_docs.py')\ndel docs['PAGES'][{ELSEWHERE!r}]\n"
        "try: docs['main']()\n"
        "except SystemExit as e: print(e.code)\n"
        "print([m for m in ('torch', 'ray', 'megatron', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-3:]


@pytest.mark.parametrize("name", [name for name in docs.PAGES if name != ELSEWHERE])
def test_a_page_is_up_to_date(name, checked):
    stale = checked[0].removeprefix("out of date: ").split(", ")
    assert f"{name}.md" not in stale, f"docs/{name}.md is out of date: python scripts/generate_docs.py"


def test_every_key_has_a_meaning():
    assert all(field.description for field in schema_keys().values())
    page = docs.configuration()
    assert all(f"| `{key.rpartition('.')[2]}` |" in page for key in schema_keys())


def test_every_metric_is_on_the_page():
    page = docs.metrics()
    assert all(f"`{metric.name}`" in page for metric in all_metrics())


def test_a_key_that_is_gone_is_found(monkeypatch):
    gone = [{"goal": "g", "intro": "i", "steps": [{"keys": ["actor.optim.learning_rate"], "text": "t"}]}]
    monkeypatch.setattr(docs, "_source", lambda name: gone)
    with pytest.raises(ValueError, match="learning_rate"):
        docs.tuning()


def test_a_key_without_a_meaning_is_found(monkeypatch):
    monkeypatch.setattr(ModelConfig.model_fields["path"], "description", None)
    with pytest.raises(ValueError, match=r"model\.path has no meaning"):
        docs.configuration()


def test_the_seven_problems_of_users_on_ascend_are_there():
    page = docs.known_problems()
    for symptom in (
        "flash_attn", "torch._dynamo", "Memory allocation fails", "Please set micro_batch_size",
        "Out of memory in the optimizer step",
        "num_query_groups (4) must be a multiple", "Could not override 'algorithm.filter_groups.enable'",
    ):  # fmt: skip
        assert symptom in page


def test_making_them_imports_nothing_heavy_and_the_check_says_by_its_code_that_none_is_out_of_date(checked):
    assert checked == ["out of date: none", "0", "[]"]


def test_degrees_that_a_model_allows_are_those_by_hand():
    """Qwen3-30B-A3B: 48 layers, 32 heads, 4 KV heads, 128 experts of 768. DeepSeek-V3: 61 layers, a prime number."""
    rows = {line.split(" | ")[0]: line for line in docs.rule_pages.layouts().splitlines()}
    own = rows["| Qwen3-30B-A3B"].split(" | ")[4:]
    assert own == ["1, 2, 4, 8, 16, 32", "1, 2, 3, 4, 6, 8, 12, 16, 24, 48", "any", "1, 2, 4, 8, 16, 32, 64 |"]
    assert rows["| DeepSeek-V3"].split(" | ")[5] == "1, 61"
    assert rows["| Qwen3-Next-80B-A3B"].split(" | ")[6] == "1"  # gated delta attention passes no state on


def test_what_validate_refuses_is_on_its_page():
    page = docs.rule_pages.refusals()
    assert "| `rollout.min_engines` | must be at most rollout.num_engines |" in page
    assert not re.search(r"\{[cm]\.", page)
