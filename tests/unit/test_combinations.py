"""The array of combinations: against all rows there are, where these can be counted; and over the real rules."""

import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1] / "proofs"))

from combination_axes import (
    AXES,
    CRITIC_APART,
    PRESETS,
    TRIPLED,
    as_overrides,
    other_layout,
    other_schedule,
    refusal,
    settings,
)
from combination_run import EXIT_CODES, LEFT_OUT, THEN, largest_difference, lost_or_twice, token_versions
from combination_run import log_probs as read_log_probs
from combination_world import make_tool_world, make_world
from combinations import row_of, words
from covering import Contradiction, Rules, covering_array, most_first, wanted

from mrl.config.load import load_config
from mrl.model import load_model_spec
from mrl.model.layout import TrainLayout

SMALL = {"a": ("0", "1", "2"), "b": ("0", "1"), "c": ("0", "1", "2"), "d": ("0", "1")}


def pair_and_triple(row) -> str | None:
    if row["a"] == "1" and row["b"] == "1":
        return "a 1 with b 1"
    return "a 2 with c 2 and d 1" if (row["a"], row["c"], row["d"]) == ("2", "2", "1") else None


def at_one_alone(row) -> str | None:
    """Makes a pair illegal that no rule names: c 1 goes with neither value of d."""
    return "c 1" if row["c"] == "1" and row["a"] != "0" else None


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("rule", [lambda row: None, pair_and_triple, at_one_alone])
def test_every_set_of_values_that_some_legal_row_holds_is_in_a_row(rule, seed):
    array = covering_array(SMALL, rule, ("a", "c", "d"), seed)
    legal_rows = [dict(zip(SMALL, values, strict=True)) for values in product(*SMALL.values())]
    legal_rows = [row for row in legal_rows if rule(row) is None]
    assert all(row in legal_rows for row in array.rows)
    for values in wanted(SMALL, ("a", "c", "d")):
        legal = any(values <= frozenset(row.items()) for row in legal_rows)
        assert any(values <= frozenset(row.items()) for row in array.rows) == legal, sorted(values)
        assert (values in array.illegal) != legal


def test_an_array_is_the_same_for_a_seed_and_smaller_than_all_rows():
    axes = {str(axis): tuple("0123") for axis in range(6)}
    first, again = (covering_array(axes, lambda row: None) for _ in range(2))
    assert first == again
    assert 16 <= len(first.rows) < 40  # of 4,096


def test_rows_with_most_that_is_new_come_first():
    rows = covering_array(SMALL, pair_and_triple, seed=3).rows
    asked = wanted(SMALL)
    order = most_first(rows, asked, held=rows[:1])
    assert sorted(order) == list(range(len(rows))) and order[-1] == 0

    def new(number: int, before: list[int]) -> int:
        earlier = [frozenset(rows[one].items()) for one in [0, *before]]
        return sum(
            values <= frozenset(rows[number].items()) and not any(values <= row for row in earlier) for values in asked
        )

    for place, number in enumerate(order):
        assert all(new(number, order[:place]) >= new(later, order[:place]) for later in order[place:])


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (lambda row: "never" if row["b"] == "1" else None, "b 1 is refused beside the first value of every .*: never"),
        (lambda row: "always", "a 0 is refused"),
        (lambda row: "not so" if row["a"] == "0" and row["b"] == row["c"] == "1" else None, "is legal in"),
    ],
)  # fmt: skip
def test_rules_that_leave_no_array_are_named(rule, told):
    with pytest.raises(Contradiction, match=told):
        covering_array(SMALL, rule)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("combinations"), make_tool_world.Calling(steps=1))


def test_the_first_value_of_every_axis_goes_with_every_other(world):
    Rules(AXES, lambda row: refusal(row, world)).check()


def test_every_value_is_something_of_its_own(world):
    usual = {axis: values[0] for axis, values in AXES.items()}
    for axis in AXES.keys() - {"end", "then"}:
        found = [str(settings(usual | {axis: value}, world)) for value in AXES[axis]]
        assert len(set(found)) == len(found), axis
    assert set(EXIT_CODES) == set(AXES["end"]) and set(THEN) == set(AXES["then"]) and set(TRIPLED) <= set(AXES)


def test_a_run_goes_on_by_something_else_than_it_began_with():
    usual = {axis: values[0] for axis, values in AXES.items()}
    assert all(other_layout(usual | {"actor": value})["actor"] != value for value in AXES["actor"])
    assert all(other_schedule(usual | {"schedule": value})["schedule"] != value for value in AXES["schedule"])


@pytest.mark.parametrize("actor", AXES["actor"])
def test_a_critic_apart_lies_otherwise_than_the_actor_wherever_that_lies(actor, world):
    row = {axis: values[0] for axis, values in AXES.items()} | {"loss": CRITIC_APART, "actor": actor}
    for one in (row, other_layout(row)):
        assert refusal(one, world) is None
        config = load_config(PRESETS["separate"], None, as_overrides(settings(one, world))).config
        model = load_model_spec(config.model.path)
        layouts = (TrainLayout.build(each.layout.model_dump(), model) for each in (config.actor, config.critic))
        assert len(set(layouts)) == 2


def test_each_token_is_of_the_version_whose_span_it_stands_in():
    spans = [{"first_token": 0, "version": 3}, {"first_token": 2, "version": 4}]
    assert token_versions({"response_ids": [7, 7, 7], "weight_version": spans}) == [3, 3, 4]
    context = {"response_ids": [7, 7, 7], "sampled": [True, False, True], "weight_version": spans[:1]}
    assert token_versions(context) == [3, None, 3]


def test_log_probs_of_other_weights_are_off_and_a_rounding_is_not(world, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(world / "Qwen3-MoE", dtype=torch.float32)
    sample = {"prompt_ids": [5, 6, 7], "response_ids": [8, 9, 10, 11], "weight_version": [SPAN]}
    sample["rollout_log_probs"] = read_log_probs(model, sample).tolist()
    sixteen = ("float32", "bfloat16")
    assert largest_difference(world / "Qwen3-MoE", [sample], 3, ("float32",), 1e-4) < 1e-5
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight.neg_()
    model.save_pretrained(tmp_path / "other")
    assert largest_difference(tmp_path / "other", [sample], 3, sixteen, 1e-3) > 1e-2
    sample["rollout_log_probs"][2] = float("nan")
    assert largest_difference(world / "Qwen3-MoE", [sample], 3, sixteen, 0.15) == float("inf")


SPAN = {"first_token": 0, "version": 3}


def record(steps: int = 3, groups: int = 2, responses: int = 4) -> tuple[list[dict], dict[int, list[dict]]]:
    """A run's lines of metrics and its samples by step, with nothing lost."""
    rows = [{"training/global_step": step, "train/trained_groups": float(groups)} for step in range(1, steps + 1)]
    by_step = {
        step: [
            {"group_id": group, "prompt_id": 10 * step + group, "seed": 1000 * step + 10 * group + index}
            for group in range(groups)
            for index in range(responses)
        ]
        for step in range(1, steps + 1)
    }
    return rows, by_step


def test_a_record_with_every_response_in_one_step_has_no_problem():
    assert list(lost_or_twice(*record(), 4)) == []


LOSSES = {
    "a response": (lambda rows, by_step: by_step[2].pop(5), "step 2: groups [1] have not 4 responses each"),
    "a group": (lambda rows, by_step: by_step.update({2: by_step[2][:4]}), "step 2: samples of 1 groups, trained on 2"),
    "a file": (lambda rows, by_step: by_step.pop(3), "step 3: samples of 0 groups, trained on 2"),
    "a line": (lambda rows, by_step: rows.pop(1), "steps [1, 3] do not follow one another from 1 on"),
    "the first line": (lambda rows, by_step: rows.pop(0), "steps [2, 3] do not follow one another from 1 on"),
    "all": (lambda rows, by_step: (rows.clear(), by_step.clear()), "steps [] do not follow one another from 1 on"),
    "a line said again": (lambda rows, by_step: rows.insert(1, rows[0]), "steps [1, 1, 2, 3] do not follow"),
    "a response of the step before": (
        lambda rows, by_step: by_step[3][0].update({"prompt_id": 20, "seed": 2000}),
        "responses in two steps: [(20, 2000)]",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_a_record_lost_or_has_twice_is_one_problem(name):
    rows, by_step = record()
    change, said = LOSSES[name]
    change(rows, by_step)
    (problem,) = lost_or_twice(rows, by_step, 4)
    assert problem.startswith(said)


@pytest.mark.parametrize("metric", LEFT_OUT)
def test_a_response_that_the_record_says_was_left_out_is_not_lost(metric):
    rows, by_step = record()
    by_step[2].pop(5)
    rows[0][metric] = 0.1
    assert len(list(lost_or_twice(rows, by_step, 4))) == 1
    rows[1][metric] = 0.1
    assert list(lost_or_twice(rows, by_step, 4)) == []


def test_a_row_is_read_as_it_is_written():
    usual = {axis: values[0] for axis, values in AXES.items()}
    assert all(row_of(words(row)) == row for row in (usual | {axis: values[1]} for axis, values in AXES.items()))
