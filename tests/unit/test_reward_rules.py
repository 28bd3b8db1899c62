"""Built-in rewards, how a function is found, and how its answers are judged: all without a process."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest

from mrl.config.schema_data import RewardConfig
from mrl.driver.assemble_data import check_least_scores
from mrl.errors import ConfigError, DataError
from mrl.reward.builtin_rules import ENVIRONMENT, LEAST_SCORE, RULES, exact_match, gsm8k
from mrl.reward.items import RewardResult, RewardSpec, check_failures, failures_at_the_bottom
from mrl.reward.reasoning_rule import REASONING
from mrl.reward.resolve import check_data_sources, resolve
from mrl.reward.worker import _loaded, judge, score_one

# what each rule takes for right where the truth is A
RIGHT = {
    "exact_match": "A", "gsm8k": "#### 5", "math_dapo": "Answer: A", "multiple_choice": "\\boxed{A}",
    "think_format": "so</think>A",
    "boxed_format": "\\boxed{A}", "math": "\\boxed{A}",
}  # fmt: skip


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [("42", "42", 1), (" 42\n", "42", 1), ("42", 42, 1), ("042", "42", 0), ("", "42", 0), ("4 2", "42", 0)],
)
def test_exact_match(response, truth, score):
    assert exact_match("toy", response, truth) == score


@pytest.mark.parametrize(
    ("response", "score", "answered"),
    [
        ("so it is\n#### 1,234", 1, 1),
        ("#### 7 no, #### 1234", 1, 1),  # the last one counts
        ("#### 1234 no, #### 7", 0, 1),
        ("the answer is 1234", 0, 0),  # strict: only after ####
        ("####1234", 0, 0),
        ("#### -1234", 0, 1),
        ("#### 1234" + " " * 300, 0, 0),  # out of sight
    ],
)
@pytest.mark.parametrize("truth", ["1234", "1,234", 1234])
def test_gsm8k_is_strict(response, score, answered, truth):
    assert gsm8k("openai/gsm8k", response, truth) == {"score": score, "acc": score, "answered": answered}


def test_auto_goes_by_the_rows_data_source():
    function = resolve(RewardSpec())
    assert function("openai/gsm8k", "#### 3", "3", {})["score"] == 1
    assert function("exact_match", "3", "3", {}) == 1
    check_data_sources(RewardSpec(), {"openai/gsm8k", "exact_match"})
    with pytest.raises(ConfigError, match=r"'other'.*exact_match, gsm8k"):
        check_data_sources(RewardSpec(), {"openai/gsm8k", "other"})
    check_data_sources(RewardSpec("exact_match"), {"other"})


def test_a_users_function_gets_its_arguments_and_may_import_its_neighbours(tmp_path):
    (tmp_path / "mrl_test_neighbour.py").write_text("BONUS = 0.5\n")
    file = tmp_path / "mine.py"
    file.write_text(
        "from mrl_test_neighbour import BONUS\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, weight=1):\n"
        "    return {'score': weight * BONUS, 'seen': f'{data_source} {solution_str} {ground_truth} {extra_info}'}\n"
    )
    function = resolve(RewardSpec(path=str(file), kwargs={"weight": 3}))
    assert score_one(function, "s", "r", 5, {"a": 1}) == ("ok", 1.5, {"seen": "s r 5 {'a': 1}"}, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("import nowhere_to_be_found", "ModuleNotFoundError"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("def score(): pass", "no function 'compute_score'; the file defines: score"),
        ("compute_score = 3", "no function 'compute_score'; the file defines: no function"),
        ("async def compute_score(**_): return 1.0", "compute_score is async, and a reward is a plain function"),
        (
            "class Judge:\n    async def __call__(self, **_): return 1.0\ncompute_score = Judge()",
            "compute_score is async",
        ),
        (
            "import functools\nclass Judge:\n    async def __call__(self, **_): return 1.0\n"
            "compute_score = functools.partial(Judge())",
            "compute_score is async",
        ),
        (
            "def compute_score(text, truth): return 1.0",
            r"compute_score\(text, truth\) is called .* by the names data_source",
        ),
        ("def compute_score(data_sources, solution_strs, **_): return [1.0]", "for one response at a time"),
        ("def compute_score(weight, **_): return 1.0", "reward_kwargs: missing a required argument: 'weight'"),
    ],
)
def test_a_users_file_that_cannot_serve_is_refused_with_the_reason(tmp_path, text, message):
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        resolve(RewardSpec(path=str(file)))


@pytest.mark.parametrize(
    "text",
    [
        "def compute_score(solution_str, ground_truth, **_): return 1.0",
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, weight): return weight",
        "class Judge:\n    def __call__(self, **_): return 1.0\ncompute_score = Judge()",
        "compute_score = dict",  # of C
        "import functools\ndef f(answer, truth): return 1.0\n@functools.wraps(f)\n"
        "def compute_score(data_source, solution_str, ground_truth, **_): return f(solution_str, ground_truth)",
    ],
)
def test_whatever_takes_a_rows_names_is_a_reward(tmp_path, text):
    (file := tmp_path / "mine.py").write_text(text)
    assert callable(resolve(RewardSpec(path=str(file), kwargs={"weight": 1.0} if "weight" in text else {})))


def test_a_failure_for_want_of_a_permission_says_which_key_gives_it(tmp_path):
    (file := tmp_path / "mine.py").write_text(
        "import os\n"
        "def compute_score(solution_str, **_):\n"
        "    if solution_str == 'key':\n        return os.environ['NO_SUCH_KEY']\n"
        "    raise OSError('[Errno -3] Temporary failure in name resolution')\n"
    )
    _, answer = _loaded(RewardSpec(path=str(file)), None)
    assert "name this one under reward.environment" in answer("s", "key", "5", {})[3]
    assert "reward.network: true" in answer("s", "net", "5", {})[3]


def test_an_unknown_rule_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="auto, exact_match, gsm8k"):
        resolve(RewardSpec("nope"))


@pytest.mark.parametrize("value", [1, 1.0, True, np.float32(1), np.array([1.0]), np.bool_(True), {"score": 1}])
def test_every_kind_of_number_is_a_score(value):
    reason, score, _, _ = judge(value)
    assert (reason, score, type(score)) == ("ok", 1.0, float)


@pytest.mark.parametrize("value", ["1", None, [1], np.array([1.0, 2.0]), 1j, {"points": 1}, {"score": "1"}, {}])
def test_everything_else_is_the_wrong_type(value):
    assert judge(value)[0] == "wrong_type"


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, {"score": math.nan}, np.float32("nan"), 1e31, -(10**300)]
)
def test_a_score_that_is_no_number_is_said_to_be(value):
    assert judge(value)[0] == "not_a_number"


@pytest.mark.parametrize("value", [0.25, -1, True, np.float32(0.25)])
def test_a_number_alone_is_the_accuracy_as_in_verl(value):
    assert judge(value)[2] == {"acc": float(value)}


@pytest.mark.parametrize("value", [{"score": 1}, {"score": 1, "acc": 0}, "1", math.nan])
def test_no_accuracy_is_made_up_where_parts_are_named_or_nothing_is_scored(value):
    assert judge(value)[2].get("acc") == (value.get("acc") if isinstance(value, dict) else None)


@pytest.mark.parametrize("rule", sorted(RULES.keys() - {ENVIRONMENT, REASONING}))  # which ask others
def test_every_built_in_rule_says_how_right_an_answer_is(rule):
    truth = "5" if rule == "gsm8k" else "A"
    wrong, right = (score_one(RULES[rule], "s", text, truth, {})[2]["acc"] for text in ("", RIGHT[rule]))
    assert (wrong, right) == (0.0, 1.0)


def test_parts_are_numbers_or_short_text():
    assert judge({"score": 0, "acc": True, "why": "x" * 900, "nan": math.nan})[2] == {
        "acc": 1.0,
        "why": "x" * 500,
        "nan": "nan",
    }


@pytest.mark.parametrize(
    ("good", "failed"),
    [([1.0, 0.0], 0.0), ([1.0, 1.0], 0.0), ([1.0, -1.0], -1.0), ([1.0], 0.0), ([-2.5, -0.5], -2.5), ([], 0.0)],
)
def test_a_failure_is_never_worth_more_than_a_wrong_answer(good, failed):
    """Under math_dapo, whose wrong answers have -1, a fixed 0 would pay for an answer that hangs its verifier."""
    results = [
        RewardResult(0, 7.0, {}, "timeout"),
        *(RewardResult(i + 1, score, {}, "ok") for i, score in enumerate(good)),
    ]
    found = failures_at_the_bottom(results)
    assert [r.score for r in found] == [failed, *good]
    assert [(r.sample_id, r.reason) for r in found] == [(r.sample_id, r.reason) for r in results]


def test_failures_beyond_the_allowed_share_stop_the_run_with_their_reasons():
    good = [RewardResult(i, 1.0, {}, "ok") for i in range(8)]
    bad = [
        RewardResult(8, 0.0, {}, "timeout", "no answer within 1 s"),
        RewardResult(9, 0.0, {}, "raised", "KeyError: 'x'"),
    ]
    check_failures(good + bad, 0.2)
    with pytest.raises(
        DataError, match=r"2 of 10 responses[\s\S]*1 timeout: no answer within 1 s\n  1 raised: KeyError"
    ):
        check_failures(good + bad, 0.19)


def test_the_worker_imports_nothing_heavy():
    code = (
        "import sys, mrl.reward.worker as w; print([m for m in ('torch', 'ray', 'vllm', 'numpy', "
        "'transformers') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30).stdout.strip() == "[]"
    )


def test_a_worker_whose_run_ends_before_it_was_told_anything_says_nothing():
    requests, told = os.pipe()
    os.close(told)
    command = [sys.executable, "-m", "mrl.reward.worker", str(requests), "2"]
    with subprocess.Popen(command, pass_fds=(requests,), stderr=subprocess.PIPE, text=True) as worker:
        assert worker.communicate(timeout=30) == (None, "") and worker.returncode == 0
    os.close(requests)


@pytest.mark.parametrize(
    ("sources", "function", "is_refused"),
    [
        (["math_dapo"], "auto", True),
        (["openai/gsm8k", "aime2024"], "auto", True),
        (["openai/gsm8k"], "math_dapo", True),
        (["openai/gsm8k", "lighteval/MATH"], "auto", False),
        (["math_dapo"], "math", False),
    ],
)
def test_maxrl_is_refused_with_rules_that_score_below_zero_before_anything_starts(sources, function, is_refused):
    reward = RewardConfig(function=function)
    check_least_scores("grpo", reward, sources)
    if is_refused:
        with pytest.raises(ConfigError, match="the rule math_dapo gives a wrong response -1"):
            check_least_scores("maxrl", reward, sources)
    else:
        check_least_scores("maxrl", reward, sources)


def test_only_the_rules_in_the_table_score_below_zero():
    for name in sorted(RULES.keys() - {ENVIRONMENT, REASONING}):
        value = RULES[name](name, "nonsense", "A", {})
        score = value["score"] if isinstance(value, dict) else value
        assert (score, name in LEAST_SCORE) == ((LEAST_SCORE.get(name, 0.0)), score < 0)
