"""What does not go with generation ahead of training is refused by name; the bound is said."""

import pytest

from mrl.config.load import load_config
from mrl.config.rules import notes, violations
from mrl.config.schedule_rules import schedule_of
from mrl.model import model_spec
from mrl.model.registry import known_hf_config

BASE = "parallel_configs/qwen3-30b-a3b/h100-4x8-separate.yaml"
MODEL = model_spec(known_hf_config("Qwen3-30B-A3B"))
BOUNDED = ["trainer.schedule=bounded", "trainer.max_staleness=2"]
PARTIAL = [*BOUNDED, "trainer.partial_rollouts=true"]
REFUSED = {
    ("trainer.schedule=one_step_off", "cluster.placement=colocated"): ("trainer.schedule", "take turns"),
    ("trainer.max_staleness=2",): ("trainer.max_staleness", "must be 0 with schedule: sync"),
    ("trainer.schedule=one_step_off", "trainer.partial_rollouts=true"): ("trainer.partial_rollouts", "key of bounded"),
    ("trainer.schedule=bounded", "trainer.partial_rollouts=true"): ("trainer.partial_rollouts", "needs max_staleness"),
    (*BOUNDED, "algorithm.anchor=rollout"): ("algorithm.anchor", "must be recompute"),
    (*PARTIAL, "trainer.segment_tokens=100000"): ("trainer.segment_tokens", "must be less than"),
    (*BOUNDED, "trainer.segment_tokens=100"): ("trainer.segment_tokens", "needs partial_rollouts"),
    (*BOUNDED, "data.gen_batch_size=512", "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.on_exhausted=error"): (
        "data.gen_batch_size", "must be left out"),
    (*BOUNDED, "algorithm.anchor=on_policy"): ("algorithm.anchor", "must be recompute"),
    (*PARTIAL, "trainer.order=ready_first", "actor.router_replay=R3"): ("actor.router_replay", "must not be R3"),
    (*BOUNDED, "algorithm.filter_groups.enable=true", "algorithm.filter_groups.on_exhausted=partial",
     "algorithm.filter_groups.max_num_gen_batches=5"): ("algorithm.filter_groups.on_exhausted", "must be error"),
}  # fmt: skip


def resolved(overrides):
    return load_config(BASE, None, list(overrides))


@pytest.mark.parametrize("overrides", REFUSED, ids=" ".join)
def test_what_cannot_be_together_is_refused(overrides):
    field, said = REFUSED[overrides]
    found = [v for v in violations(resolved(overrides), MODEL) if v.field == field]
    assert len(found) == 1 and said in f"{found[0].rule}; {found[0].why}"


@pytest.mark.parametrize("overrides", [["trainer.schedule=one_step_off"], BOUNDED, PARTIAL])
def test_what_runs_is_legal_and_its_bound_is_said(overrides):
    config = resolved(overrides)
    assert [v for v in violations(config, MODEL) if v.field.startswith("trainer.")] == []
    staleness = 1 if "one_step_off" in overrides[0] else 2
    assert any(f"no token is older than {staleness} updates" in note for note in notes(config, MODEL))
    assert schedule_of(config.config).max_staleness == staleness


def test_a_segment_is_shorter_than_the_longest_response():
    longest = resolved([]).config.data.max_response_length
    for tokens, refused in ((longest, True), (longest - 1, False)):
        found = violations(resolved([*PARTIAL, f"trainer.segment_tokens={tokens}"]), MODEL)
        assert ("trainer.segment_tokens" in {v.field for v in found}) == refused


def test_routes_of_the_engine_go_with_responses_that_end_at_a_version():
    replayed = [*PARTIAL, "actor.router_replay=R3"]
    assert [v for v in violations(resolved(replayed), MODEL) if v.field == "actor.router_replay"] == []


def test_a_synchronous_run_is_at_staleness_0_and_has_no_note():
    schedule = schedule_of(resolved([]).config)
    assert schedule.is_synchronous and schedule.unit == 1 and schedule.step_limit is None
    assert not any("trainer.schedule" in note for note in notes(resolved([]), MODEL))
