"""Which unit tests a change concerns: scripts/changed_tests.py, on a small tree."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))
import changed_tests  # noqa: E402

FILES = {
    "mrl/__init__.py": "",
    "mrl/errors.py": "",
    "mrl/algo/__init__.py": "",
    "mrl/algo/losses.py": "import mrl.errors\n",
    "mrl/record/__init__.py": "",
    "mrl/record/spec.py": "",
    "mrl/cli/__init__.py": "",
    "mrl/cli/main.py": "from mrl.cli import plan, import_verl\n",
    "mrl/cli/plan.py": "from mrl.record import spec\n",
    "mrl/cli/import_verl.py": "",
    "mrl/driver/__init__.py": "",
    "mrl/driver/loop.py": "def f():\n    from mrl.algo import losses\n",
    "tests/unit/helper.py": "from mrl.algo import losses\n",
    "tests/unit/test_losses.py": "from mrl.algo.losses import x\n",
    "tests/unit/test_by_name.py": "PLACE = 'mrl.algo.losses.LIMIT'\n",
    "tests/unit/test_by_helper.py": "import helper\n",
    "tests/unit/test_loop.py": "from mrl.driver import loop\n",
    "tests/unit/test_plan.py": "from mrl.cli.main import main\nmain(['plan'])\n",
    "tests/unit/test_import.py": "from mrl.cli.main import main\nmain(['import-verl'])\n",
    "tests/unit/test_presets.py": "FOLDER = 'parallel_configs'\n",
    "tests/unit/test_house.py": "",
    "tests/outside/test_outside_losses.py": "golden('losses')\n",
}
CASES = {
    "mrl/algo/losses.py": {"losses", "by_name", "by_helper", "loop"},
    "mrl/errors.py": {"losses", "by_name", "by_helper", "loop"},
    "mrl/cli/plan.py": {"plan"},
    "mrl/cli/import_verl.py": {"import"},
    "mrl/record/metrics.yaml": {"plan"},
    "tests/unit/helper.py": {"by_helper"},
    "tests/outside/golden/losses.json.gz": {"outside_losses"},
    "parallel_configs/a/b.yaml": {"presets"},
    "docs/none.md": set(),
}


@pytest.fixture
def tree(tmp_path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("changed", CASES)
def test_a_change_concerns_the_tests_that_run_what_changed_and_no_others(tree, changed):
    found = {Path(path).stem.removeprefix("test_") for path in changed_tests.concerned([changed], tree)}
    assert found == CASES[changed] | {"house"}


def test_what_all_tests_share_concerns_all_and_no_change_none(tree):
    everything = [path for path in FILES if "/test_" in path]
    assert changed_tests.concerned(["tests/unit/conftest.py"], tree) == sorted(everything)
    assert changed_tests.concerned([], tree) == []
