"""The loss and the advantage of the tutorial's page: their own tests as a reader runs them, and what refuses others."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mrl.algo.advantages import (
    ADVANTAGE_FUNCTIONS,
    WHITENED,
    AdvantageInputs,
    load_custom_advantage,
    register_advantage,
    response_advantages,
    tried_advantage,
)
from mrl.algo.losses import TOKEN_LOSSES, load_custom_loss
from mrl.algo.own_functions import unload
from mrl.config.load import load_config
from mrl.config.rules import violations
from mrl.errors import ConfigError
from mrl.model import planning_model_spec

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial" / "own_loss.md"
TINY = ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
FILES = dict(re.findall(r"^cat > (\S+) <<'PY'\n(.*?)^PY$", PAGE.read_text(), re.MULTILINE | re.DOTALL))


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The page's files, as it writes them."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    ADVANTAGE_FUNCTIONS.pop("ranks", None)


@pytest.mark.parametrize("name", ["test_my_loss.py", "test_my_advantage.py"])
def test_the_pages_own_tests_pass(page, name):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, name], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "right" in done.stdout, done.stderr


def test_one_file_may_hold_the_loss_and_the_advantage(page):
    """A rank loads both in one process; a start tries the advantage first, and may do so twice."""
    (page / "both.py").write_text(FILES["my_loss.py"] + FILES["my_advantage.py"].partition('"""\n')[2])
    try:
        for _ in range(2):
            with tried_advantage("both.py", "ranks"):
                assert "ranks" in ADVANTAGE_FUNCTIONS
            assert "ranks" not in ADVANTAGE_FUNCTIONS
        load_custom_loss("both.py", "quadratic")
        load_custom_advantage("both.py", "ranks")
        with pytest.raises(ConfigError, match="registers quadratic, not 'cubic'"):
            load_custom_loss("both.py", "cubic")
        (page / "other.py").write_text(FILES["my_loss.py"])
        with pytest.raises(ConfigError, match="'quadratic' is taken"):
            load_custom_loss("other.py", "quadratic")
    finally:
        TOKEN_LOSSES.pop("quadratic", None)


TWO_OF_ONE_NAME = """
from functools import partial
from mrl.algo.losses import register_loss
def loss(parameters, inputs, log_ratio, scale=1.0):
    return None
register_loss("own")(partial(loss, scale=2.0))
register_loss({name!r})(loss)
"""


def test_a_name_is_taken_whatever_function_asks_for_it_and_free_again_where_its_file_failed(page):
    (page / "twice.py").write_text(TWO_OF_ONE_NAME.format(name="own"))
    (page / "once.py").write_text(TWO_OF_ONE_NAME.format(name="other"))
    (page / "again.py").write_text(TWO_OF_ONE_NAME.format(name="own"))
    with pytest.raises(ConfigError, match="'own' is taken"):
        load_custom_loss("twice.py", "own")
    try:
        with pytest.raises(ConfigError, match="registers other, own, not 'zzz'"):
            load_custom_loss("once.py", "zzz")
        with pytest.raises(ConfigError, match="'own' is taken"):
            load_custom_loss("again.py", "own")
    finally:
        unload("once.py")
    assert not {"own", "other"} & TOKEN_LOSSES.keys()


@pytest.mark.parametrize("loss_first", [True, False])
def test_a_file_that_another_one_imports_may_run_beside_it(page, monkeypatch, loss_first):
    (page / "link").symlink_to(page)
    monkeypatch.syspath_prepend(page / "link")
    (page / "losses_of_mine.py").write_text(FILES["my_loss.py"] + "helper = 1\n")
    (page / "advantages_of_mine.py").write_text("from losses_of_mine import helper\n" + FILES["my_advantage.py"])
    calls = [partial(load_custom_loss, "losses_of_mine.py", "quadratic")]
    calls.insert(loss_first, partial(load_custom_advantage, "advantages_of_mine.py", "ranks"))
    try:
        for call in calls:
            call()
    finally:
        for table, name in ((TOKEN_LOSSES, "quadratic"), (ADVANTAGE_FUNCTIONS, "ranks")):
            assert table.pop(name)
        monkeypatch.delitem(sys.modules, "losses_of_mine")


def test_an_advantage_gives_one_number_a_response():
    name = "of_one_number"
    register_advantage(name, whitened=True)(lambda inputs: np.zeros(1))
    try:
        assert name in WHITENED
        with pytest.raises(ConfigError, match=r"of_one_number: gives an array of shape \(1,\), and there are 3"):
            response_advantages(name, AdvantageInputs(np.zeros(3), np.zeros(3), np.ones(3)))
        with pytest.raises(ConfigError, match="'grpo' is taken"):
            register_advantage("grpo")(lambda inputs: inputs.scores)
    finally:
        ADVANTAGE_FUNCTIONS.pop(name)
        WHITENED.discard(name)


def test_what_is_wrong_with_a_file_is_said(page):
    load_custom_advantage("my_advantage.py", "ranks")
    load_custom_advantage("my_advantage.py", "ranks")
    with pytest.raises(ConfigError, match=r"registers ranks, not 'other'"):
        load_custom_advantage("my_advantage.py", "other")
    with pytest.raises(ConfigError, match=r"custom_advantage\.path: .*gone\.py is no Python file"):
        load_custom_advantage("gone.py", "ranks")


def fields(*overrides: str, check_paths: bool = False) -> list[str]:
    resolved = load_config(TINY, overrides=["model.path=Qwen/Qwen3-30B-A3B", *overrides])
    found = violations(resolved, planning_model_spec(resolved.config.model.path)[0], check_paths)
    return [v.field for v in found if v.field.startswith("algorithm.")]


def test_the_name_is_ones_own_and_the_file_is_there(page):
    own = "algorithm.custom_advantage.path=my_advantage.py"
    assert fields(own, "algorithm.adv_estimator=ranks", check_paths=True) == []
    assert fields("algorithm.adv_estimator=ranks") == ["algorithm.adv_estimator"]
    assert fields(own, "algorithm.adv_estimator=grpo") == ["algorithm.adv_estimator"]
    assert fields(own, "algorithm.adv_estimator=rank", check_paths=True) == ["algorithm.custom_advantage.path"]
    gone = "algorithm.custom_advantage.path=gone.py"
    assert fields(gone, "algorithm.adv_estimator=ranks", check_paths=True) == ["algorithm.custom_advantage.path"]
