"""`mrl plan --search` finds every layout that fits, and no other, in the order that it claims."""

import json
import random
import time
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from seldom import seldom

from mrl.cli.main import main
from mrl.config.load import ResolvedConfig, load_config
from mrl.config.rules import violations
from mrl.config.schema import with_values
from mrl.errors import LONGEST
from mrl.model import forward_flops_per_token, known_spec, planning_model_spec
from mrl.model.layout import TrainLayout, check_train_layout, is_legal_layout
from mrl.model.precision import BF16
from mrl.plan.activations import MicroBatchShape, Recompute
from mrl.plan.devices import find_device
from mrl.plan.memory import memory_section
from mrl.plan.model_state import stage_state
from mrl.plan.plan_inputs import PlanInputs, batch_plan, device_for, recompute_of
from mrl.plan.times import PassWork, micro_batch_count, pipeline_slots, update_seconds
from mrl.platforms.versions import MEGATRON
from mrl.tools.first_config import usual_config
from mrl.tools.search import SearchProblem, SearchResult, fullest_phase, legal_layouts, recomputes, search, stronger
from mrl.tools.search_report import fastest_that_fit, run_with, search_problem, search_report

ROOT = Path(__file__).resolve().parents[2]
TP, PP, VPP, CP, EP, ETP = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip
COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
MOST_TRIED = 1000  # layouts; of a case that has more every second, third, ... is held against brute force
CASES = {"30B on 32": ("Qwen3-30B-A3B", 32), "235B on 128": ("Qwen3-235B-A22B", 128)}


def problem(name: str, devices: int, megatron: str = "0.16.1", device: str = "h100-80g") -> SearchProblem:
    model, found = known_spec(name), find_device(device)
    work = PassWork(model, MicroBatchShape(1, 10240, 8192), 512 * 5120, forward_flops_per_token(model, 2560))
    return SearchProblem(work, found, devices, found.devices_per_node, 1 << 29, megatron)


@cache
def found_in(name: str) -> tuple[SearchResult, float]:
    """What the search of a case finds, and the seconds that it took."""
    start = time.process_time()  # of this process alone, however busy the machine is
    return search(problem(*CASES[name])), time.process_time() - start


def every_legal_layout(name: str, world: int) -> set[TrainLayout]:
    """All degrees that the rules allow, one by one; evenly split stages, counting embedding and loss or not."""
    model = known_spec(name)
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    layouts = set()
    for tp, pp, cp, ep, etp in product(sizes, repeat=5):
        if world % (tp * cp * pp) or world % (ep * etp * pp):
            continue
        for embedding, loss in product((False, True), repeat=2):
            stage = (model.num_layers + embedding + loss) / pp
            for vp in range(1, int(stage) + 1) if pp > 1 else (1,):
                degrees = dict(
                    zip((TP, PP, VPP, CP, EP, ETP), (tp, pp, vp if vp > 1 else None, cp, ep, etp), strict=True)
                )
                degrees |= {"world_size": world} | dict(zip(COUNTED, (embedding, loss), strict=True))
                if stage % vp == 0 and not check_train_layout(degrees, model):
                    layouts.add(TrainLayout.build(degrees, model))
    return layouts


def groups_of_several_ranks(layout: TrainLayout) -> int:
    """Of a model with experts, whose embeddings are not tied."""
    replicas = layout.context * layout.data
    dense = (layout.tensor, layout.context, layout.pipeline, replicas, layout.tensor * replicas)
    experts = (layout.expert, layout.expert_tensor, layout.expert * layout.expert_tensor, layout.expert_data)
    whole = (layout.world_size, layout.world_size)  # of Megatron and of torch
    return sum(ranks > 1 for ranks in dense + experts + whole)


def cheapest_that_fits(case: SearchProblem, layout: TrainLayout):
    """(predicted seconds, bytes, recomputation) without any shortcut; None where nothing fits."""
    states = {pp: stage_state(case.model, layout, pp, BF16) for pp in range(layout.pipeline)}
    for recompute in recomputes(case.model):
        phase = fullest_phase(case, layout, recompute, states)
        if phase.total <= phase.device_bytes - case.device.group * groups_of_several_ranks(layout):
            heaviest = max(states.values(), key=lambda s: s.parameters + s.gradients + s.optimizer)
            seconds = update_seconds(
                case.work_in(layout), layout, case.device, case.per_node, heaviest, recompute, case.assumptions
            )
            return seconds.total, phase.total, recompute
    return None


@pytest.mark.parametrize("name", seldom(CASES, "235B on 128"))
def test_search_equals_brute_force_over_legal_layouts(name):
    case, (result, _) = problem(*CASES[name]), found_in(name)
    legal = every_legal_layout(*CASES[name])
    assert result.legal == len(legal)
    tried = set(sorted(legal, key=repr)[:: 1 + len(legal) // MOST_TRIED])
    fitting = {layout: best for layout in tried if (best := cheapest_that_fits(case, layout))}
    found_here = {c.layout: (c.seconds.total, c.phase.total, c.recompute) for c in result.fitting if c.layout in tried}
    assert found_here == fitting and 0 < len(fitting) < len(tried)
    assert [best[:2] for best in found_here.values()] == sorted(best[:2] for best in fitting.values())
    assert sum(result.too_large.values()) == len(legal) - len(result.fitting)


@pytest.mark.parametrize("name", seldom(CASES, "235B on 128"))
def test_search_takes_less_than_ten_seconds(name):
    assert found_in(name)[1] < 10


def test_any_legal_degrees_are_among_those_looked_at():
    """Degrees drawn at random, divisors or not: what the rules allow is in the search's list."""
    model, world, rng = known_spec("Qwen3-30B-A3B"), 32, random.Random(0)
    looked_at = {layout for _, layout in legal_layouts(problem("Qwen3-30B-A3B", world))}
    legal = 0
    for _ in range(500):
        sizes = [rng.choice((1, 1, 2, 3, 4, 8)) for _ in range(5)]
        degrees = dict(zip((TP, PP, CP, EP, ETP), sizes, strict=True)) | {"world_size": world}
        broken = check_train_layout(degrees, model)
        assert is_legal_layout(degrees, model) != bool(broken)
        if not broken:
            legal += 1
            assert TrainLayout.build(degrees, model) in looked_at
    assert legal > 20


def test_every_layout_is_listed_once_under_degrees_that_give_it():
    result, _ = found_in("235B on 128")
    assert len({c.layout for c in result.fitting}) == len(result.fitting)
    model = known_spec("Qwen3-235B-A22B")
    for candidate in result.fitting[::50]:
        assert TrainLayout.build(candidate.degrees, model) == candidate.layout


def test_no_layout_of_the_235b_model_fits_on_16_devices_of_80_gb():
    result = search(problem("Qwen3-235B-A22B", 16))
    assert result.legal > 0
    assert result.fitting == ()
    assert set(result.too_large) <= {"gradients", "optimizer", "parameters"}


def test_more_tensor_ranks_than_key_value_heads_only_with_a_megatron_that_shares_heads():
    old, new = (
        {layout.tensor for _, layout in legal_layouts(problem("Qwen3-30B-A3B", 32, version))}
        for version in ("0.12.1", "0.16.1")
    )
    assert old == {1, 2, 4}
    assert new == {1, 2, 4, 8, 16, 32}


def test_stages_are_interleaved_only_where_the_device_can():
    virtual = {
        device: {layout.virtual_pipeline for _, layout in legal_layouts(problem("Qwen3-30B-A3B", 8, device=device))}
        for device in ("h100-80g", "ascend-910b-64g")
    }
    assert max(virtual["h100-80g"]) > 1 and virtual["ascend-910b-64g"] == {1}


def test_what_a_caller_refuses_takes_no_place_among_the_fastest():
    config, model = (
        load_config(ROOT / "parallel_configs/qwen3-30b-a3b/h100-1x8.yaml").config,
        known_spec("Qwen3-30B-A3B"),
    )
    case = search_problem(config, model, find_device("h100-80g"), 8, 8, "0.16.1")
    result = search(case)
    best, _ = fastest_that_fit(config, case, result, 4)
    without = fastest_that_fit(config, case, result, 2, lambda candidate: candidate.layout != best[0].layout)[0]
    assert without == [candidate for candidate in best if candidate.layout != best[0].layout][:2]
    assert fastest_that_fit(config, case, result, 1, lambda _: False) == ([], {})


def test_interleaved_pipelines_get_a_multiple_of_their_stages_of_micro_batches():
    model = known_spec("Qwen3-30B-A3B")
    work = PassWork(model, MicroBatchShape(1, 1000, 800), 9_000, 1.0)
    plain, interleaved = (TrainLayout.build({"world_size": 4, PP: 4} | more, model) for more in ({}, {VPP: 2}))
    assert (micro_batch_count(work, plain), micro_batch_count(work, interleaved)) == (9, 12)


def test_the_bubble_shrinks_with_virtual_stages_and_micro_batches():
    case, model = problem("Qwen3-30B-A3B", 4), known_spec("Qwen3-30B-A3B")
    shares = []
    for more in ({}, {VPP: 2}, {VPP: 4}):
        layout = TrainLayout.build({"world_size": 4, PP: 4} | more, model)
        state = stage_state(model, layout, 0)
        seconds = update_seconds(case.work, layout, case.device, 8, state, Recompute(), case.assumptions)
        shares.append(seconds.bubble / (seconds.total - seconds.bubble))
        count = micro_batch_count(case.work, layout)
        steady = seconds.compute + seconds.tensor + seconds.expert + seconds.context + seconds.pipeline
        assert seconds.bubble == pytest.approx(steady * 3 / (layout.virtual_pipeline * count))
        waiting, working = pipeline_slots(layout, count)
        assert seconds.bubble_share == pytest.approx(waiting / (waiting + working))  # which mrl plan prints
    assert shares == sorted(shares, reverse=True)


def test_a_token_budget_is_of_one_device_so_context_parallelism_multiplies_it():
    """16,384 tokens a device; over 4 context ranks a micro-batch of 65,536, as the plan has it. 5,120 a device:
    never under a sample.
    """
    device, model = find_device("h100-80g"), known_spec("Qwen3-30B-A3B")
    for budget, expected in ((16384, {1: 16384, 2: 32768, 4: 65536}), (5120, {1: 10240, 2: 10240, 4: 20480})):
        config = usual_config("Qwen3-30B-A3B", model, device, 32)
        actor = config.actor.model_copy(update={"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": budget})
        config = config.model_copy(update={"actor": actor})
        case = search_problem(config, model, device, 32, 8, "0.16.1")
        layouts = {cp: TrainLayout.build({"world_size": 32, CP: cp}, model) for cp in expected}
        assert {cp: case.work_in(layout).micro.tokens for cp, layout in layouts.items()} == expected
        assert {cp: batch_plan(config, layout).micro for cp, layout in layouts.items()} == {
            cp: case.work_in(layout).micro for cp, layout in layouts.items()
        }
        count = micro_batch_count(case.work_in(layouts[4]), layouts[4])
        assert count == -(-int(case.work.tokens) // (expected[4] * 8))  # 32 devices in 4 context ranks: 8 replicas


def run_json(capsys, *arguments: str) -> dict:
    main(["plan", "--search", *arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def test_the_command_lists_the_best_with_reasons(capsys):
    answer = run_json(capsys, "--model", "Qwen/Qwen3-8B", "--devices", "8", "--device", "h100-80g", "--top", "3")
    assert (answer["devices"], answer["device"], len(answer["layouts"])) == (8, "h100-80g", 3)
    assert [row["seconds"] for row in answer["layouts"]] == sorted(row["seconds"] for row in answer["layouts"])
    for row in answer["layouts"]:
        assert row["bytes"] <= row["device_bytes"]
        assert "GiB" in row["why"]
    assert answer["engines"][0].startswith("engine of 1")


def test_with_a_configuration_only_layouts_are_shown_that_fit_by_its_whole_plan(capsys):
    """A reference model is not the search's to count: what it takes for some of the fastest is too much beside one,
    and mrl plan says so.
    """
    file = str(ROOT / "parallel_configs/qwen3-30b-a3b/h100-4x8-separate.yaml")
    kl = ("--set", "algorithm.use_kl_loss=true")
    without = run_json(capsys, file, "--top", "24")["layouts"]
    beside = run_json(capsys, file, "--top", "6", *kl)["layouts"]
    config = load_config(file, overrides=["algorithm.use_kl_loss=true"]).config
    model, device = known_spec("Qwen3-30B-A3B"), find_device("h100-80g")

    def fullest(row: dict) -> dict:
        recompute = next(way for way in recomputes(model) if str(way) == row["recompute"])
        return memory_section(PlanInputs.of(run_with(config, row["degrees"], recompute), model, device))

    assert not all(fullest(row)["fits"] for row in without)
    assert len(beside) == 6
    assert [row["seconds"] for row in beside] == sorted(row["seconds"] for row in beside)
    for row in beside:
        memory = fullest(row)
        actor = [phase["bytes"] for phase in memory["phases"].values() if phase["stage"] is not None]
        assert (memory["fits"], max(actor)) == (True, row["bytes"])
        assert "reference" in row["terms"]


def test_an_optimizer_on_the_host_lets_layouts_fit_that_do_not_with_it_on_the_device(capsys):
    file = str(ROOT / "parallel_configs/qwen3-30b-a3b/h100-1x8.yaml")
    key = "actor.optim.override_optimizer_config"

    def searched(share: float) -> dict:
        sets = (f"{key}.optimizer_cpu_offload=true", f"{key}.optimizer_offload_fraction={share}")
        with suppress(SystemExit):  # with all of it on the device nothing fits
            main(["plan", "--search", file, "--json", "--top", "1", "--set", sets[0], "--set", sets[1]])
        return json.loads(capsys.readouterr().out)

    kept, host = searched(0.0), searched(1.0)
    assert host["fitting"] > kept["fitting"]
    assert host["layouts"][0]["terms"].get("optimizer", 0) == 0


def test_a_configuration_with_which_nothing_fits_says_why(capsys):
    """Engines that take no more than 2% of their devices hold no model, whatever the actor's layout."""
    file = str(ROOT / "parallel_configs/qwen3-30b-a3b/h100-4x8-separate.yaml")
    with pytest.raises(SystemExit):
        main(["plan", "--search", file, "--json", "--set", "rollout.gpu_memory_utilization=0.02"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["layouts"] == []
    assert list(answer["left_out"]) == ["a cache of less than one sequence"]


def test_the_command_says_so_when_nothing_fits(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--search", "--model", "Qwen3-235B-A22B", "--devices", "32", "--device", "h100-80g"])
    shown = capsys.readouterr().out
    assert ended.value.code == 7
    assert shown.startswith("NOTHING FITS: 0 of ") and "seconds of an update" not in shown
    assert "layouts that do not fit, by their largest term: " in shown
    assert "would fit with: --set actor.optim.override_optimizer_config.optimizer_cpu_offload=true" in shown
    assert "would fit on 64 x h100-80g, counting the actor alone" in shown


def test_what_a_search_says_would_do_does(capsys):
    """Of a whole configuration: the settings, layout included, make its plan fit."""
    preset = str(ROOT / "parallel_configs/qwen3-30b-a3b/h100-1x8.yaml")
    # the preset has Adam's states on the host
    switches = ("optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer")
    off = dict.fromkeys(switches, "false") | {"optimizer_offload_fraction": 0.0}
    words = [f"--set=actor.optim.override_optimizer_config.{name}={value}" for name, value in off.items()]
    with pytest.raises(SystemExit):
        main(["plan", "--search", preset, *words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["fit"] == "does not fit" and found["layouts"] == []
    more = [word for setting in found["would_fit_with"] for word in ("--set", setting)]
    assert more
    main(["plan", preset, *words, *more, "--json"])
    assert json.loads(capsys.readouterr().out)["fit"] == "fits"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--search",), "give CONFIG, or with --search a --model"),
        (("--search", "--model", "Qwen3-8B"), "needs --devices N and --device NAME"),
        (("--search", "--model", "Qwen3-8B", "--devices", "8", "--device", "x100"), "known: a100-80g"),
        (("--search", "--model", "Owl-8B", "--devices", "8", "--device", "h100-80g"), "known by name for planning"),
        (("config.yaml", "--model", "Qwen3-8B", "--search"), "give CONFIG, or with --search a --model"),
        (("--search", "--model", "Qwen3-8B", "--devices", "0"), "argument --devices: must be at least 1"),
        (("--search", "--model", "Qwen3-8B", "--top", "many"), "argument --top: 'many' is not a whole number"),
    ],
)
def test_a_bad_request_is_refused(capsys, arguments, said):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *arguments])
    assert stopped.value.code in (2, 4)
    told = capsys.readouterr().err
    assert said in told
    assert all(len(line) <= LONGEST + len("mrl plan: ") for line in told.splitlines())


@pytest.mark.parametrize(
    "name", ["Llama4ForConditionalGeneration", "Gemma3ForCausalLM", "KimiK25ForConditionalGeneration"]
)
def test_a_model_of_another_family_is_refused_in_few_words(capsys, tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name], "vision_config": {}}))
    with pytest.raises(SystemExit):
        main(["plan", "--search", "--model", str(tmp_path), "--devices", "8", "--device", "h100-80g"])
    told = capsys.readouterr().err.removeprefix("mrl plan: ").strip()
    assert name in told and "is not supported" in told and len(told) <= LONGEST


def test_of_what_is_computed_again_the_least_that_fits_is_taken():
    """On the same devices nothing, what costs no product, experts alone, or all, as micro-batches grow."""
    taken = []
    for tokens in (4_096, 14_336, 20_480, 65_536):
        case = problem("Qwen3-30B-A3B", 32)
        case = replace(case, work=replace(case.work, micro=MicroBatchShape(1, tokens, tokens // 2)))
        layout = TrainLayout.build({"world_size": 32, TP: 2, EP: 8}, case.model)
        states = {pp: stage_state(case.model, layout, pp, case.precision) for pp in range(layout.pipeline)}
        taken.append(next(r for r in recomputes(case.model) if fullest_phase(case, layout, r, states).fits))
    assert taken == list(recomputes(case.model))


def test_what_does_not_fit_the_whole_plan_is_tried_with_the_next_recomputation():
    case = problem("Qwen3-30B-A3B", 32)
    none, norms, experts, everything = recomputes(case.model)
    assert stronger(case, none) == (norms, experts, everything) and stronger(case, everything) == ()


@pytest.mark.parametrize(("recipe", "left"), [({}, [0, 2, 3]), ({"fp8_recipe": "blockwise"}, [0, 1, 2, 3])])
def test_norms_are_kept_in_fp8_with_the_scaling_for_which_megatron_refuses_them(recipe, left):
    config = load_config(ROOT / "parallel_configs" / "qwen3-30b-a3b" / "h100-4x8.yaml").config
    given = config.model.override_transformer_config | {"fp8": "hybrid"} | recipe
    model = known_spec("Qwen3-30B-A3B")
    config = with_values(config, {"model.override_transformer_config": given})
    case = search_problem(config, model, device_for(config), 32, 8, MEGATRON)
    assert case.recomputes == tuple(recomputes(model)[number] for number in left)


@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        ("moonlight-16b-a3b/h100-1x8", []),  # latent attention goes without context parallelism there
        (
            "qwen3-30b-a3b/h100-4x8",
            ["distillation.enabled=true", "distillation.teacher_model.model_path=Qwen/Qwen3-14B"],
        ),
    ],
)
def test_with_a_configuration_no_layout_is_shown_that_breaks_a_rule(preset, settings):
    config = load_config(ROOT / "parallel_configs" / f"{preset}.yaml", None, settings).config
    model = planning_model_spec(config.model.path)[0]
    case = search_problem(config, model, device_for(config), config.actor.layout.world_size, 8, MEGATRON)
    rows = search_report(config, case, 5, planned=True)["layouts"]
    assert len(rows) == 5
    for row in rows:
        (recompute,) = [way for way in recomputes(model) if str(way) == row["recompute"]]
        changed = run_with(config, row["degrees"], recompute)
        broken = violations(ResolvedConfig(changed, {}), model)
        assert [one for one in broken if one.field.startswith("actor.layout")] == []
        assert memory_section(PlanInputs.of(changed, model, device_for(config)))["fits"]


def test_a_candidates_recomputation_is_what_its_configuration_says():
    config = load_config(ROOT / "parallel_configs" / "qwen3-30b-a3b" / "h100-4x8.yaml").config
    for recompute in recomputes(known_spec("Qwen3-30B-A3B")):
        changed = run_with(config, {"world_size": 32, EP: 8}, recompute)
        assert recompute_of(changed) == recompute
        assert violations(ResolvedConfig(changed, {}), known_spec("Qwen3-30B-A3B")) == []


def test_a_long_search_says_how_far_it_is(capsys, monkeypatch):
    from mrl.cli import slow_work

    now = [0.0]
    monkeypatch.setattr(slow_work.time, "monotonic", lambda: now[0])
    tell = slow_work.SlowWork("searching: {:,} layouts so far, {:,} fit")
    for layouts, seconds in ((0, 0.0), (900, 2.9), (1000, 3.1), (1500, 5.0), (2000, 6.2)):
        now[0] = seconds
        tell(layouts, layouts // 2)
    said = capsys.readouterr().err.splitlines()
    assert said == ["searching: 1,000 layouts so far, 500 fit, 3 s", "searching: 2,000 layouts so far, 1,000 fit, 6 s"]


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V3", "openai/gpt-oss-120b"])
def test_no_layout_cuts_the_context_of_attention_that_has_no_kernels_for_it(name):
    """As LATENT_RULES and SINK_RULES refuse it outside cpu."""
    model = planning_model_spec(name)[0]
    config = load_config(ROOT / "parallel_configs" / "qwen3-30b-a3b" / "h200-1x8.yaml").config
    problem = search_problem(config, model, find_device("h200-141g"), 64, 8, MEGATRON)
    found = {layout.context for _, layout in legal_layouts(problem)}
    assert found == {1}
