"""When drafts pay: held against published runs, and against the arithmetic of acceptance."""

import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from test_memory_host import inputs_of

from mrl.cli.plan import plan_lines
from mrl.config.schema_rollout import SpeculationConfig
from mrl.engine.requests import engine_settings
from mrl.model.layout import RolloutLayout
from mrl.model.megatron_shards import source_shards
from mrl.plan.devices import USUAL, Measured, MeasuredLengths
from mrl.plan.draft_times import tokens_per_step, with_drafts
from mrl.plan.engine_memory import cache_bytes_per_token, draft_weight_bytes, state_bytes_per_sequence
from mrl.plan.generation_times import (
    decode_step,
    draft_choice,
    draft_section,
    generation_seconds,
    pays_up_to,
    with_found_drafts,
)
from mrl.plan.measured_steps import lengths_of
from mrl.plan.memory import actor_bytes
from mrl.plan.plan_inputs import batch_plan, engine_of
from mrl.plan.run_plan import make_plan
from mrl.plan.times import actor_seconds
from mrl.tools.search import candidate_of, fullest_phase
from mrl.tools.search_report import search_problem

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import published_runs  # noqa: E402

GLM = "glm-4.6/h200-16x8"


def accepting(inputs, *accepted: float, method: str = "mtp"):
    lengths = MeasuredLengths(1024, (4096,), 8192, accepted=accepted, drafted_by=method)
    return replace(inputs, assumptions=replace(inputs.assumptions, measured=Measured(lengths)))


def test_published_runs_are_on_the_right_side_of_one_and_those_with_a_batch_within_a_quarter():
    found = {run.row["run"]: run for run in published_runs.compared_drafts()}
    assert len(found) >= 3
    for name, run in found.items():
        assert (run.predicted > 1) == (run.row["published"] > 1), name
        assert "goal" not in run.row or abs(run.error) <= run.row["goal"] <= 0.25, name
        assert ("missed" in run.row) == (abs(run.error) > 0.25), name


@pytest.mark.parametrize(("tokens", "acceptance"), [(1, 0.5), (3, 0.8), (6, 0.95)])
def test_tokens_of_a_step_follow_leviathan(tokens, acceptance):
    """Equation 1 of arXiv 2211.17192: (1 - a^(k+1)) / (1 - a)."""
    inputs = replace(inputs_of(GLM), assumptions=replace(USUAL, draft_acceptance=acceptance))
    expected = (1 - acceptance ** (tokens + 1)) / (1 - acceptance)
    assert tokens_per_step(with_drafts(inputs, tokens)) == pytest.approx(expected)
    assert tokens_per_step(with_drafts(inputs, 0)) == 1


def test_measured_acceptance_counts_instead_and_is_what_runs_say():
    """SkyRL's three positions give 3.32 tokens a step, as its page says."""
    inputs = with_drafts(accepting(inputs_of(GLM), 0.886, 0.770, 0.663), 3)
    assert tokens_per_step(inputs) == pytest.approx(3.32, abs=0.005)
    assert tokens_per_step(with_drafts(inputs, 4)) == pytest.approx(3.319 + 0.663 * 0.886)
    rows = [
        {"response_length/mean": 10.0, "response_length/max": 20.0, "prompt_length/mean": 5.0,
         "drafts/acceptance_at/1": at, "drafts/acceptance_at/2": at / 2}
        for at in (0.8, 0.6)
    ]  # fmt: skip
    assert lengths_of(rows, 100, "mtp").accepted == pytest.approx((0.7, 0.35))
    assert lengths_of(rows, 100).accepted == ()


def test_a_look_up_counts_the_steps_in_which_it_finds_nothing_and_for_itself_alone():
    """Found in 1 of 5 steps and accepted with 0.7, it gives 1.14 tokens a step, and says nothing of other methods."""
    row = {"response_length/mean": 10.0, "response_length/max": 20.0, "prompt_length/mean": 5.0}
    found = lengths_of([row | {"drafts/acceptance_at/1": 0.7, "drafts/step_share": 0.2}], 100, "ngram")
    inputs = accepting(inputs_of(GLM), *found.accepted, method=found.drafted_by)
    assert tokens_per_step(with_drafts(inputs, 1, "ngram")) == pytest.approx(1.14)
    assert tokens_per_step(with_drafts(inputs, 1)) == 1 + USUAL.draft_acceptance


def test_drafts_that_are_never_accepted_cost_and_all_accepted_ones_save():
    inputs = inputs_of(GLM)
    batch = batch_plan(inputs.config, inputs.train)
    plain = with_drafts(inputs, 0)
    without = generation_seconds(plain, batch, engine_of(plain))

    def seconds(accepted: float) -> float:
        drafting = with_drafts(accepting(inputs, accepted), 1)
        lengths = replace(drafting.assumptions, measured=None, draft_acceptance=accepted)
        return generation_seconds(replace(drafting, assumptions=lengths), batch, engine_of(drafting))

    assert seconds(0.0) > without > seconds(1.0) > without / 2
    assert draft_choice(replace(inputs, assumptions=replace(USUAL, draft_acceptance=0.0)), batch).tokens == 0


def test_the_batch_up_to_which_drafts_pay_is_where_a_token_takes_as_long_without():
    row = next(row.row for row in published_runs.compared_drafts() if "verl" in row.row["run"])
    inputs = published_runs.draft_inputs(row)
    drafting, plain = with_drafts(inputs, 3), with_drafts(inputs, 0)
    last = pays_up_to(drafting)
    context = 1024 + 4096 / 2
    for sequences, pays in ((last, True), (last + 1, False)):
        with_them = decode_step(drafting, engine_of(drafting), sequences, context).total / tokens_per_step(drafting)
        assert (with_them < decode_step(plain, engine_of(plain), sequences, context).total) == pays
    assert 0 < last < row["engines"]["rollout.max_num_seqs"]


def test_a_layer_that_is_trained_along_takes_the_last_stages_time_and_memory():
    found = {}
    for train in (False, True):
        inputs = inputs_of(GLM, "rollout.speculation={method: mtp, tokens: 1}", f"actor.mtp={{train: {train}}}")
        batch = batch_plan(inputs.config, inputs.train)
        kept = [actor_bytes(inputs, batch, pp).activations for pp in range(inputs.train.pipeline)]
        found[train] = (*actor_seconds(inputs, batch), kept)
    (old, update, kept), (old_along, update_along, kept_along) = found.values()
    assert old_along == old
    most = max(sum(stage) for stage in inputs.train.chunk_layers)
    assert update.compute < update_along.compute < update.compute * (1 + 3 / most)
    assert kept_along[:-1] == kept[:-1] and kept_along[-1] > kept[-1]
    assert not inputs.config.critic.as_actor(inputs.config.actor).mtp.train


def test_a_search_counts_a_layer_that_is_trained_along():
    found = {}
    for train in (False, True):
        inputs = inputs_of(GLM, "rollout.speculation={method: mtp, tokens: 1}", f"actor.mtp={{train: {train}}}")
        layout = inputs.train
        problem = search_problem(inputs.config, inputs.model, inputs.device, layout.world_size, 8, "0.16.1")
        recompute = problem.recomputes[0]
        last = problem.state(layout, layout.pipeline - 1)
        fullest = fullest_phase(problem, layout, recompute, {layout.pipeline - 1: last})
        seconds = candidate_of(problem, {}, layout, recompute, fullest, last).seconds.compute
        found[train] = last.parameters, fullest.total, seconds
    more = [trained - plain for plain, trained in zip(*found.values(), strict=True)]
    own = sum(prod(shard.local_shape) for shard in predicting_shards(inputs))
    assert more[0] == pytest.approx(2 * own, rel=1e-4)
    assert more[1] > more[0] and more[2] > 0


def predicting_shards(inputs) -> list:
    """Of the last rank."""
    shards = source_shards(inputs.model.holding(True), inputs.train, inputs.train.world_size - 1)
    return [shard for shard in shards if shard.megatron_name.startswith("mtp.")]


def test_a_layer_that_stays_as_it_came_takes_its_weights_on_the_last_stage_alone():
    without = inputs_of(GLM)
    inputs = inputs_of(GLM, "rollout.speculation={method: mtp, tokens: 1}")
    batch = batch_plan(inputs.config, inputs.train)
    more = [
        actor_bytes(inputs, batch, pp).parameters - actor_bytes(without, batch, pp).parameters
        for pp in range(inputs.train.pipeline)
    ]
    widths = [4 if shard.megatron_name.endswith("expert_bias") else 2 for shard in predicting_shards(inputs)]
    own = [prod(shard.local_shape) for shard in predicting_shards(inputs)]
    assert more == [0] * (inputs.train.pipeline - 1) + [sum(w * n for w, n in zip(widths, own, strict=True))]


def test_a_predicting_layer_is_counted_in_the_memory_of_engines():
    """GLM-4.6: 160 experts of three products of 5,120 x 1,536, a shared one, attention, and 2 x 5,120 x 5,120."""
    inputs = inputs_of(GLM)
    attention = 5120 * (96 * 128 * 2 + 2 * 8 * 128) + 128 * (96 + 16) + 2 * 128
    experts = 161 * 3 * 5120 * 1536 + 160 * 5120 + 160
    whole = 2 * (attention + experts + 2 * 5120 * 5120 + 5 * 5120)
    assert draft_weight_bytes(inputs.model, RolloutLayout(1, 1), 2) == whole
    plain, drafting = engine_of(with_drafts(inputs, 0)), engine_of(with_drafts(inputs, 2))
    assert drafting.draft > 0 and drafting.total <= plain.total + 1
    assert drafting.cache_tokens < plain.cache_tokens * 92 / 93


def test_hybrids_keep_a_state_for_each_drafted_token():
    """vLLM 0.32, v1/kv_cache_interface.py, MambaSpec: pages of 1 + num_speculative_blocks, one for each drafted token;
    look-ups draft, too.
    """
    inputs = inputs_of("qwen3.5-35b-a3b/h100-4x8")
    drafting = replace(
        inputs,
        config=inputs.config.model_copy(
            update={
                "rollout": inputs.config.rollout.model_copy(
                    update={"speculation": SpeculationConfig(method="ngram", tokens=1)}
                )
            }
        ),
    )
    size = inputs.rollout.tensor
    batch = batch_plan(inputs.config, inputs.train).samples
    given = min(inputs.config.rollout.max_num_seqs, batch // (inputs.rollout.num_engines * inputs.rollout.data))
    states = given * state_bytes_per_sequence(inputs.model, size, 2)
    per_token = cache_bytes_per_token(inputs.model, size, 2)
    lost = engine_of(inputs).cache_tokens - engine_of(drafting).cache_tokens
    assert lost == pytest.approx(states / per_token * inputs.rollout.data, abs=2 * 16 * inputs.rollout.data)


def test_the_plan_says_what_drafts_would_give():
    plan = make_plan(inputs_of(GLM))
    drafts = plan["times"]["drafts"]
    assert not drafts["used"] and drafts["seconds"] < drafts["seconds_without"]
    assert any("if rollout.speculation used" in line for line in plan_lines(plan))
    assert make_plan(inputs_of("qwen3-30b-a3b/h100-4x8"))["times"]["drafts"] is None
    ngram = with_drafts(inputs_of(GLM), 3, "ngram")
    found = draft_section(ngram, batch_plan(ngram.config, ngram.train))
    assert found["acceptance"] == [] and "seconds" not in found


def test_auto_gives_engines_the_plans_number_and_ends_drafts_with_vllms_schedule(tmp_path):
    row = next(row.row for row in published_runs.compared_drafts() if "verl" in row.row["run"])
    inputs = published_runs.draft_inputs(row)
    auto = with_drafts(inputs, "auto").config.model_copy(
        update={"cluster": inputs.config.cluster.model_copy(update={"accelerator": "h20-96g"})}
    )
    found = with_found_drafts(auto, inputs.model).rollout.speculation
    choice = draft_choice(inputs, batch_plan(inputs.config, inputs.train))
    assert (found.tokens, found.max_num_seqs) == (choice.tokens, choice.up_to) and 0 < choice.up_to < 1024
    settled = auto.model_copy(update={"rollout": auto.rollout.model_copy(update={"speculation": found})})
    given = engine_settings(settled, inputs.model, 0, tmp_path).arguments["speculative_config"]
    assert given["num_speculative_tokens"] == choice.tokens
    assert given["num_speculative_tokens_per_batch_size"] == [
        (1, choice.up_to, choice.tokens), (choice.up_to + 1, 1024, 0)
    ]  # fmt: skip
    seconds = {
        name: generation_seconds(each, batch_plan(each.config, each.train), engine_of(each))
        for name, each in [(name, with_drafts(inputs, name)) for name in ("auto", 0, 1, 2, 3)]
    }
    assert seconds["auto"] == min(seconds.values()) < min(seconds[0], seconds[3])
    with_none = replace(inputs, assumptions=replace(USUAL, draft_acceptance=0.0))
    assert draft_choice(with_none, batch_plan(inputs.config, inputs.train)).tokens == 0


@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_drafts_that_end_above_one_sequence_save_nothing_of_large_batches(method):
    inputs = inputs_of(GLM)
    plain = generation_seconds(with_drafts(inputs, 0), batch_plan(inputs.config, inputs.train), engine_of(inputs))
    rollout = inputs.config.rollout
    limited = SpeculationConfig(method=method, tokens=3, max_num_seqs=1)
    config = inputs.config.model_copy(update={"rollout": rollout.model_copy(update={"speculation": limited})})
    limited = replace(inputs, config=config)
    seconds = generation_seconds(limited, batch_plan(config, inputs.train), engine_of(limited))
    assert seconds == pytest.approx(plain, rel=0.02)
