"""What `mrl plan` predicts is held against runs that others have published, and follows what it counts."""

import json
import re
import sys
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from test_memory_host import inputs_of

from mrl.cli.main import make_parser
from mrl.cli.plan import plan_lines
from mrl.config.load import load_config
from mrl.driver.resume import goes_on
from mrl.model import forward_flops, model_spec
from mrl.model.layout import TrainLayout
from mrl.model.registry import known_hf_config
from mrl.plan.activations import MicroBatchShape, Recompute
from mrl.plan.devices import USUAL, Assumptions, faster, find_device, slower
from mrl.plan.generation_times import decode_step, generation_seconds, sequences_together
from mrl.plan.measured_steps import STEP
from mrl.plan.memory import memory_section
from mrl.plan.model_state import stage_state
from mrl.plan.plan_inputs import PlanInputs, batch_plan, engine_of
from mrl.plan.run_plan import make_plan, slow_generation, step_seconds
from mrl.plan.step_work import mean_flops_per_token, mean_lengths
from mrl.plan.times import Passes, PassWork, pass_seconds, phase_seconds, step_flops, update_seconds
from mrl.record.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import published_runs  # noqa: E402

sys.path.insert(0, str(ROOT / "scripts" / "evidence"))
import predicted_runs  # noqa: E402

MIXTURE, LARGE = "qwen3-30b-a3b/h100-4x8", "qwen3-235b-a22b/h100-16x8"
TENSOR = ("rollout.data_parallel_size=1", "rollout.expert_parallel_size=1")  # engines of tensor ranks alone
FOUR = (*TENSOR, "rollout.tensor_model_parallel_size=4", "rollout.num_engines=8")


@pytest.fixture(scope="module")
def runs() -> dict[str, published_runs.Compared]:
    return {run.row["run"]: run for run in published_runs.compared()}


def test_steps_of_nemo_rl_are_predicted_within_fifteen_hundredths(runs):
    """The four that the goal names, in the shapes that they were measured in."""
    wanted = {166, 192, 358, 395}
    held = {run.row["seconds"]: abs(run.error) for run in runs.values() if run.row.get("goal")}
    assert set(held) == wanted and all(run.row["goal"] == 0.15 for run in runs.values() if run.row.get("goal"))
    assert max(held.values()) <= 0.15, held


def test_the_page_has_these_figures(runs, monkeypatch):
    import generate_docs  # here: it reads every table that a page has

    monkeypatch.setattr(published_runs, "compared", runs.values)
    page = (ROOT / "docs" / "predictions.md").read_text(encoding="utf-8")
    assert page == generate_docs.predictions(), "docs/predictions.md is out of date: python scripts/generate_docs.py"


def test_further_runs_are_there_and_most_lie_between_low_and_high(runs):
    others = [run for run in runs.values() if "goal" not in run.row]
    assert len([run for run in others if run.row.get("phase") != "sync"]) >= 6
    assert all(run.low <= run.expected <= run.high for run in runs.values())
    steps = {name: run for name, run in runs.items() if "phase" not in run.row}
    between = {name for name, run in steps.items() if run.low <= run.row["seconds"] <= run.high}
    of_nemo = {name for name in steps if name.startswith("NeMo-RL")}
    assert len(of_nemo) >= 7 and of_nemo <= between
    assert len(between) > len(steps) / 2 and all("missed" in steps[name].row for name in set(steps) - between)


def test_steps_and_syncs_of_other_trainers_stand_beside_ours(runs):
    """Two steps at least of each; a length that is not published is taken as a plan takes it, and the row says so."""
    for trainer, syncs in (("NeMo-RL", 1), ("verl", 1)):
        phases = [run.row.get("phase") for name, run in runs.items() if name.startswith(trainer)]
        assert phases.count(None) >= 2 and phases.count("sync") >= syncs, trainer
    halves = [run.row for run in runs.values() if run.row.get("response") == published_runs.HALF]
    assert halves and all("ssumed: " in row["source"] for row in halves)
    assert all(published_runs.inputs_of(row).assumptions.response_share == USUAL.response_share for row in halves)


def test_a_run_that_is_missed_by_more_than_fifteen_hundredths_says_why(runs):
    for name, run in runs.items():
        assert ("missed" in run.row) == (abs(run.error) > 0.15), (name, run.error)


def test_every_run_names_its_source(runs):
    assert all(run.row["source"] and run.row["seconds"] > 0 for run in runs.values())


ASSUMPTIONS = yaml.safe_load((ROOT / "docs" / "source" / "assumptions.yaml").read_text(encoding="utf-8"))


@cache
def stored() -> list[dict]:
    """Lines of checks that ran on some machine."""
    files = sorted((ROOT / "docs" / "results" / "hardware").glob("*.jsonl"))
    lines = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line.get("status") == "ok"]


def test_every_assumption_has_a_source():
    assert {row["name"] for row in ASSUMPTIONS if row["of"] == "assumptions"} == {
        field.name
        for field in fields(Assumptions)
        if field.name != "measured"  # which says what runs showed instead
    }
    assert all(row["source"] for row in ASSUMPTIONS)


@pytest.mark.parametrize("row", ASSUMPTIONS, ids=lambda row: row["name"])
def test_a_rung_that_an_assumption_names_reports_the_fields_it_names(row):
    """Some stored line of the rung has them all; without a stored line, the ladder's files name them."""
    assert ("rung" in row) == bool(row.get("fields"))
    assert "rung" in row or "measured" not in row, "measured by what?"
    if "rung" not in row:
        return
    ladder = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "scripts" / "hardware").glob("*.py"))
    assert f"def {row['rung']}(" in ladder
    if lines := [line for line in stored() if line["check"] == row["rung"]]:
        assert any(set(row["fields"]) <= set(line) for line in lines), row["fields"]
    else:
        assert all(f'"{field}"' in ladder for field in row["fields"]), row["fields"]


def test_what_is_said_of_an_engines_host_is_what_is_stored():
    """The stored check had two and six layers: `sequence_us` is of two, `step_s` of six, `layer_us` of one sequence."""
    found = next(line for line in stored() if line["check"] == "decode" and line["device"] == "cuda")
    one, many = (found["step_s"][batch] for batch in ("1", "256"))
    said = {row["name"]: row.get("measured", "") for row in ASSUMPTIONS}
    assert f"{(one - 6e-6 * found['layer_us']) * 1e3:.1f}e-3" in said["step_host"]
    assert f"{found['sequence_us']:.0f}e-6 in steps of two" in said["sequence_host"]
    assert f"{(many - one) / 255 * 1e6:.0f}e-6 in steps of six" in said["sequence_host"]


# ---------------------------------------------------------------- a decode step


def step(preset: str, sequences: float, *settings: str):
    inputs = inputs_of(preset, *settings)
    return decode_step(inputs, engine_of(inputs), sequences, 2000)


def test_the_worked_example_of_a_decode_step():
    settings = (*TENSOR, "rollout.tensor_model_parallel_size=2", "rollout.num_engines=16")
    inputs = inputs_of(MIXTURE, *settings)
    found = decode_step(inputs, engine_of(inputs), 128, 1700)
    assert found.host == pytest.approx(9.68e-3) and found.layers == pytest.approx(48 * 87e-6)
    assert found.exchange == pytest.approx(1.3e-3, rel=0.05)
    assert found.reading == pytest.approx((12.1 + 4.3) * 1e-3, rel=0.02)
    assert found.total == pytest.approx(31.5e-3, rel=0.01)


def test_a_lone_sequence_takes_the_floor_whatever_the_tensor_degree():
    """Reading falls with tensor ranks, the floor of layers does not: 30B on four H100 about 6 ms, 235B on eight 14."""
    eight = (*TENSOR, "rollout.tensor_model_parallel_size=8")
    small, large = step(MIXTURE, 1, *FOUR), step(LARGE, 1, *eight, "rollout.num_engines=16")
    assert small.layers == step(MIXTURE, 1, *eight, "rollout.num_engines=4").layers
    assert small.total == pytest.approx(6e-3, rel=0.35)
    assert large.total == pytest.approx(14e-3, rel=0.35)


def test_experts_that_are_spread_over_nodes_are_exchanged_over_the_network():
    spread = ("rollout.tensor_model_parallel_size=4", "rollout.data_parallel_size=4", "rollout.expert_parallel_size=16",
              "rollout.num_engines=8")  # fmt: skip
    inside = step(LARGE, 16, *spread[:1], "rollout.data_parallel_size=2", "rollout.expert_parallel_size=8",
                  "rollout.num_engines=16")  # fmt: skip
    across = step(LARGE, 16, *spread)
    device = find_device("h100-80g")
    assert across.exchange - inside.exchange > 94 * 2 * (device.network_collective - device.collective)


def test_one_sequence_more_never_makes_a_step_shorter():
    for preset in (MIXTURE, LARGE, "qwen3-8b/h100-1x8"):
        steps = [step(preset, sequences).total for sequences in (1, 2, 8, 64, 256, 1024)]
        assert steps == sorted(steps), preset


def generation(preset: str, *settings: str) -> float:
    inputs = inputs_of(preset, *settings)
    return generation_seconds(inputs, batch_plan(inputs.config, inputs.train), engine_of(inputs))


def test_generation_takes_at_least_the_longest_response_of_single_steps():
    inputs = inputs_of(MIXTURE)
    engine, longest = engine_of(inputs), inputs.config.data.max_response_length
    assert generation(MIXTURE) > longest * decode_step(inputs, engine, 1, 1000).total


def test_more_sequences_at_once_are_faster_and_never_more_than_are_given():
    few, many = (generation(MIXTURE, *FOUR, f"rollout.max_num_seqs={most}") for most in (64, 256))
    assert few > 1.3 * many
    inputs = inputs_of(MIXTURE, *FOUR, "rollout.max_num_seqs=4096")
    batch = batch_plan(inputs.config, inputs.train)
    assert sequences_together(inputs, batch, engine_of(inputs)) <= batch.samples / inputs.rollout.num_engines


def test_without_a_prefix_cache_each_response_computes_its_prompt():
    """A device computes mixed batches at a rate: each of 16 responses costs what one cost."""
    devices = 32 * find_device("h100-80g").flops * USUAL.prefill_mfu
    cached, computed = (generation(MIXTURE, f"rollout.enable_prefix_caching={on}") for on in ("true", "false"))
    inputs = inputs_of(MIXTURE)
    batch, lengths = batch_plan(inputs.config, inputs.train), mean_lengths(inputs.config, USUAL)
    again = (batch.samples - batch.prompts) * lengths.prompt * mean_flops_per_token(inputs.model, lengths)
    assert batch.samples > batch.prompts and computed - cached == pytest.approx(again / devices)


# ---------------------------------------------------------------- an update


def seconds_of(inputs: PlanInputs) -> dict[str, float]:
    return phase_seconds(inputs, batch_plan(inputs.config, inputs.train), engine_of(inputs))


def test_the_busiest_expert_rank_sets_the_pace():
    """What half as many tokens more cost lies between nothing and half of the update."""
    # of a device that waits for no host
    even, uneven = (
        seconds_of(replace(inputs_of(MIXTURE), assumptions=replace(USUAL, expert_load=load, host=0.0)))["update"]
        for load in (1.0, 1.5)
    )
    assert 1.1 < uneven / even < 1.5


def test_a_layer_takes_at_least_its_launches():
    inputs = inputs_of(MIXTURE)
    batch = batch_plan(inputs.config, inputs.train)
    slow = seconds_of(replace(inputs, assumptions=replace(USUAL, moe_launch=1.0)))["update"]
    assert slow > 3 * 48 * batch.mini_batches


def test_launches_of_a_device_that_computes_by_its_own_cores_add_to_what_it_computes():
    """A CPU's: half the launches of another host, beside the products and not behind them."""
    inputs = inputs_of(MIXTURE)

    def update(own_host: float, host: float) -> float:
        device = replace(inputs.device, own_host=own_host)
        return seconds_of(replace(inputs, device=device, assumptions=replace(USUAL, host=host)))["update"]

    computed = update(0.0, 0.0)
    launched = update(1.0, 1.0) - computed
    assert launched > 0 and update(0.5, 1.0) - computed == pytest.approx(launched / 2)
    assert max(computed, launched) <= update(0.0, 1.0) < computed + launched


def test_larger_micro_batches_spare_fixed_costs():
    """Where launches count, twice the tokens take hardly longer; a device that waits for no host spares little."""
    one, two = (
        seconds_of(inputs_of(MIXTURE, f"actor.ppo_max_token_len_per_gpu={n}"))["update"] for n in (10240, 20480)
    )
    assert 0.5 < two / one < 0.75
    one, two = (
        seconds_of(
            replace(inputs_of(MIXTURE, f"actor.ppo_max_token_len_per_gpu={n}"), assumptions=replace(USUAL, host=0.0))
        )["update"]
        for n in (10240, 20480)
    )
    assert 0.8 < two / one <= 1


def test_deepep_spares_the_network_where_experts_span_nodes_and_nothing_inside_one():
    flex = "model.override_transformer_config.moe_token_dispatcher_type=flex"
    for preset, spared in ((LARGE, True), (MIXTURE, False)):
        settings = ("actor.layout.expert_model_parallel_size=16",) if spared else ()
        plain, once = (seconds_of(inputs_of(preset, *settings, *more))["update"] for more in ((), (flex,)))
        assert (once < plain) == spared, preset


def test_what_an_actor_brings_to_the_host_and_back_takes_time():
    inputs = inputs_of(MIXTURE)
    kept = inputs_of(MIXTURE, "actor.optimizer_offload=false")
    assert seconds_of(inputs)["rest"] > seconds_of(kept)["rest"] > USUAL.rest


# ---------------------------------------------------------------- one H100's own updates


def own_lines() -> list[dict]:
    """Updates and log-probs of slices of Qwen3-30B-A3B that one H100 took (scripts/hardware/layer_slices.py)."""
    return [line for line in stored() if line["check"].startswith("actor") and "H100" in line["device"]]


def predicted(line: dict) -> tuple[float, float]:
    """Seconds of a pass of log-probs and of an update, of four micro-batches with all layers computed twice."""
    experts = {"num_experts": 128 if line["check"] == "actor" else 16}
    model = model_spec(
        dict(known_hf_config("Qwen3-30B-A3B")) | experts | {"num_hidden_layers": line["layers_computed"]}
    )
    tokens = line["tokens"]
    lengths = [tokens // part for part in (4, 4, 8, 8, 16, 16, 16, 16)]
    layout = replace(TrainLayout.grids({"world_size": 1}), chunk_layers=((model.num_layers,),))
    micro = MicroBatchShape(1, tokens, sum(length - length // 3 for length in lengths))
    kernel = "cutlass" if line.get("cutlass") == "1" else "cublas"
    flops = forward_flops(model, lengths, tokens) / tokens
    work, device = PassWork(model, micro, 4 * tokens, flops, grouped_gemm=kernel), find_device("h100-80g")
    scored = pass_seconds(work, layout, device, 8, Passes(), USUAL)
    state = stage_state(model, layout, 0)
    return scored.total, update_seconds(work, layout, device, 8, state, Recompute("full"), USUAL).total


@pytest.mark.parametrize("line", own_lines(), ids=lambda line: f"{line['check']}-{line.get('cutlass', 0)}")
def test_what_one_h100_took_is_predicted(line):
    """With 16 and 128 experts, 8,192 to 32,768 tokens, 4 to 32 layers, cuBLAS' products and CUTLASS'."""
    scored, updated = predicted(line)
    assert updated == pytest.approx(line["update_s"], rel=0.15)
    assert scored == pytest.approx(line["log_prob_s"], rel=0.15 if line.get("cutlass") != "1" else 0.25)


def test_the_lines_that_are_held_are_of_every_kind():
    assert {(line["check"], line.get("cutlass", "0")) for line in own_lines()} >= {
        ("actor", "0"), ("actor_of_eight", "0"), ("actor_8k", "0"), ("actor_8k", "1"), ("actor_16k", "0"),
        ("actor_32k", "0"),
    }  # fmt: skip


# ---------------------------------------------------------------- a reference

KL = ("algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.01")


@pytest.mark.parametrize("more", [(), ("algorithm.anchor=on_policy", "actor.ppo_mini_batch_size=512"), ("critic",)])
def test_a_kl_term_costs_a_forward_pass_more(more):
    """As long as a pass for old log-probs of the same micro-batches; nothing else of the step changes."""
    more = ("algorithm.adv_estimator=gae",) if more == ("critic",) else more
    old = seconds_of(inputs_of(MIXTURE))["log_prob"]
    plain, beside = (inputs_of(MIXTURE, *more, *kl) for kl in ((), KL))
    assert seconds_of(beside) == seconds_of(plain) | {"ref": pytest.approx(old)}
    flops, with_reference = (step_flops(each, batch_plan(each.config, each.train)) for each in (plain, beside))
    assert with_reference == flops | {"ref": flops["generation"]}


def test_a_reference_under_adapters_is_a_pass_without_them_and_moves_nothing():
    adapters = ("actor.lora.rank=32", "actor.layout.expert_model_parallel_size=1")
    found = seconds_of(inputs_of(MIXTURE, *KL, *adapters, "ref.param_offload=true"))
    assert found["ref"] == pytest.approx(seconds_of(inputs_of(MIXTURE, adapters[1]))["log_prob"])
    assert found["ref"] < found["log_prob"]


def test_a_reference_on_the_host_changes_places_with_the_actor_twice():
    inputs = inputs_of(MIXTURE, *KL)
    weights = memory_section(inputs)["phases"]["train"]["terms"]["reference"]
    moved = seconds_of(inputs_of(MIXTURE, *KL, "ref.param_offload=true"))["ref"] - seconds_of(inputs)["ref"]
    assert moved == pytest.approx(4 * weights / inputs.device.host_path_rate)


LIMITS = [
    (("ref.log_prob_max_token_len_per_gpu=30000",), ("actor.log_prob_max_token_len_per_gpu=30000",)),
    (
        ("ref.log_prob_use_dynamic_bsz=false", "ref.log_prob_micro_batch_size_per_gpu=3"),
        ("actor.use_dynamic_bsz=false", "actor.log_prob_micro_batch_size_per_gpu=3"),
    ),
]


@pytest.mark.parametrize(("own", "of_actor"), LIMITS)
def test_a_reference_has_micro_batches_of_its_own(own, of_actor):
    found = seconds_of(inputs_of(MIXTURE, *KL, *own))
    assert found["ref"] == pytest.approx(seconds_of(inputs_of(MIXTURE, *of_actor))["log_prob"])
    assert found["ref"] != pytest.approx(found["log_prob"])


@pytest.mark.parametrize(("own", "of_actor"), LIMITS)
def test_a_references_micro_batches_take_their_own_memory(own, of_actor):
    phases = memory_section(inputs_of(MIXTURE, *KL, *own))["phases"]
    passes = memory_section(inputs_of(MIXTURE, *KL, *of_actor))["phases"]["log_prob"]
    assert phases["ref"]["terms"] == passes["terms"]
    assert phases["ref"]["terms"]["log_prob"] != phases["log_prob"]["terms"]["log_prob"]


# ---------------------------------------------------------------- the whole


def test_a_plan_says_low_expected_and_high():
    plan = make_plan(inputs_of(MIXTURE))
    low, expected, high = step_seconds(plan)
    assert low < expected < high < 2 * expected
    for phase, seconds in plan["times"]["phase_seconds"].items():
        assert plan["times"]["phase_seconds_low"][phase] <= seconds <= plan["times"]["phase_seconds_high"][phase]
    (printed,) = [line for line in plan_lines(plan) if line.startswith("predicted at the assumed rates")]
    said = re.search(r"a step (\S+) s, from (\S+) to (\S+):", printed).groups()
    assert [float(number) for number in said] == [float(f"{seconds:.3g}") for seconds in (expected, low, high)]


def test_every_end_of_a_range_is_on_its_side():
    assert USUAL.measured is None
    for name in (field.name for field in fields(Assumptions) if field.name != "measured"):
        low, usual, high = (getattr(found, name) for found in (faster(USUAL), USUAL, slower(USUAL)))
        assert low <= usual <= high or low >= usual >= high


def test_a_step_of_many_small_batches_says_so():
    cramped = make_plan(
        inputs_of(LARGE, "rollout.tensor_model_parallel_size=8", "rollout.data_parallel_size=1",
                  "rollout.expert_parallel_size=1", "rollout.num_engines=16", "rollout.gpu_memory_utilization=0.8")
    )  # fmt: skip
    said, step = slow_generation(cramped), step_seconds(cramped)[1]
    generation = cramped["times"]["phase_seconds"]["generation"]
    assert said.startswith(f"generation {generation:,.0f} s of a step of {step:,.0f} s: ")
    assert "sequences fit an engine" in said and step / 2 < generation < step
    assert f"SLOW: {said}" in list(plan_lines(cramped))
    assert slow_generation(make_plan(inputs_of(MIXTURE))) == ""


def test_work_of_a_pass_knows_who_sends_tokens_once():
    assert not {field.name: field.default for field in fields(PassWork)}["once_a_node"]


def test_a_run_of_the_comparison_that_was_interrupted_goes_on_and_a_whole_one_is_not_trained_again(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(ROOT)
    world = predicted_runs.WORLDS["tiny"]
    folder = tmp_path / "batch-by2"
    commands = []

    def ran(command, cwd):
        commands.append(command)
        return SimpleNamespace(returncode=0 if len(commands) < 3 else 5)

    monkeypatch.setattr(predicted_runs.subprocess, "run", ran)
    resumed = []
    for _ in range(2):
        predicted_runs.trained(world, "batch /2", folder)
        assert commands[-1][:4] == [sys.executable, "-m", "mrl.cli.main", "train"]
        options = make_parser().parse_args(commands[-1][3:])
        settings = [*options.overrides, f"trainer.run_dir={options.run_dir}"]
        config = load_config(options.config, overrides=settings).config
        assert config.data.train_batch_size == 32
        resumed.append(goes_on(config.trainer, options.resume))
        folder.mkdir(exist_ok=True)
        RunDir(folder).config.write_text("", encoding="utf-8")
    assert resumed == [False, True]
    with pytest.raises(SystemExit, match="training ended with 5; a second call goes on with it"):
        predicted_runs.trained(world, "batch /2", folder)
    RunDir(folder).metrics.write_text("".join(json.dumps({STEP: step}) + "\n" for step in range(world.steps)))
    predicted_runs.trained(world, "batch /2", folder)
    assert len(commands) == 3
