"""Switches that make an update faster: what refuses each, and docs/efficiency.md row by row."""

import importlib.util
import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrl.cli.main import main
from mrl.cli.plan import search_lines
from mrl.config.load import load_config
from mrl.config.rules import violations
from mrl.config.schema import RunConfig, with_values
from mrl.errors import EnvironmentFault
from mrl.model import planning_model_spec
from mrl.plan.memory import memory_section
from mrl.plan.plan_inputs import PlanInputs, batch_plan, device_for
from mrl.plan.times import actor_seconds
from mrl.platforms import layers
from mrl.platforms.hosting import get_hosting
from mrl.platforms.layers import check_dispatcher, check_gated_delta
from mrl.platforms.versions import MEGATRON
from mrl.tools.search_report import search_problem, search_report
from mrl.tools.switches import missing_switches

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "parallel_configs"
MOE, DENSE = PRESETS / "qwen3-30b-a3b" / "h100-4x8.yaml", PRESETS / "qwen3-8b" / "h100-1x8.yaml"
A2 = PRESETS / "qwen3-30b-a3b" / "a2-4x8.yaml"
NEXT = PRESETS / "qwen3-next-80b-a3b" / "h100-4x8.yaml"
CUTLASS, FLA, TUNED = "model.grouped_gemm=cutlass", "model.gated_delta=fla", f"rollout.tuned_experts={PRESETS}"
TRANSFORMER = "model.override_transformer_config."
DISPATCHER = TRANSFORMER + "moe_token_dispatcher_type=flex"
DEEPEP_SET = f"--set {DISPATCHER}"


def refused(preset: Path, *overrides: str) -> dict[str, str]:
    """Field, without what all have before it -> the rule that it breaks."""
    resolved = load_config(preset, None, overrides)
    model = planning_model_spec(resolved.config.model.path)[0]
    return {v.field.removeprefix(TRANSFORMER): v.rule for v in violations(resolved, model)}


@pytest.mark.parametrize(
    ("preset", "overrides", "field", "said"),
    [
        (A2, [DISPATCHER], "moe_token_dispatcher_type", "alltoall outside cuda"),
        (MOE, [DISPATCHER, "actor.layout.expert_model_parallel_size=1"], "moe_token_dispatcher_type", "several ranks"),
        (MOE, [TRANSFORMER + "moe_flex_dispatcher_backend=deepep"], "moe_flex_dispatcher_backend", "type: flex"),
        (MOE, [DISPATCHER, TRANSFORMER + "moe_flex_dispatcher_backend=nvshmem"], "moe_flex_dispatcher_backend",
         "unknown"),
        (MOE, [DISPATCHER, TRANSFORMER + "moe_flex_dispatcher_backend=hybridep",
               TRANSFORMER + "moe_enable_deepep=true"], "moe_flex_dispatcher_backend", "must be deepep"),
        (A2, [TRANSFORMER + "moe_router_fusion=true"], "moe_router_fusion", "false on npu"),
        (DENSE, [CUTLASS], "model.grouped_gemm", "a dense model"),
        (A2, [CUTLASS], "model.grouped_gemm", "cublas outside cuda"),
        (MOE, [CUTLASS, "cluster.accelerator=a100-80g"], "model.grouped_gemm", "cublas on A100"),
        (MOE, [CUTLASS, "model.dtype=float32"], "model.grouped_gemm", "float32"),
        (MOE, [CUTLASS, "actor.layout.tensor_model_parallel_size=4", "actor.layout.expert_tensor_parallel_size=4",
               "actor.layout.expert_model_parallel_size=2"], "model.grouped_gemm", "multiples of 128"),
        (MOE, [FLA], "model.gated_delta", "without gated delta layers"),
        (NEXT, [FLA, "model.dtype=float32"], "model.gated_delta", "float32"),
        (NEXT, [FLA, "trainer.deterministic=true"], "model.gated_delta", "deterministic"),
        (MOE, [TUNED], "rollout.tuned_experts", "has no file E=16,N=768,device_name=*.json"),
        (A2, [TUNED], "rollout.tuned_experts", "must be null for npu"),
        (DENSE, [TUNED], "rollout.tuned_experts", "must be null for cuda and this model"),
        (MOE, [TRANSFORMER + "cuda_graph_impl=local"], "cuda_graph_impl", "must be none"),
        (MOE, [TRANSFORMER + "cuda_graph_scope=[attn]"], "cuda_graph_scope", "left out"),
        (MOE, [TRANSFORMER + "enable_cuda_graph=true"], "enable_cuda_graph", "must be false"),
        (MOE, [TRANSFORMER + "overlap_moe_expert_parallel_comm=true"], "overlap_moe_expert_parallel_comm",
         "must be false"),
    ],
)  # fmt: skip
def test_a_switch_that_would_fail_or_do_nothing_is_refused_before_the_run(preset, overrides, field, said):
    found = refused(preset, *overrides)
    assert said in found[field] and len(found) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        [DISPATCHER, TRANSFORMER + "moe_flex_dispatcher_backend=hybridep"],
        [DISPATCHER, TRANSFORMER + "moe_enable_deepep=true"],
        [TRANSFORMER + "moe_router_fusion=true"],
        [TRANSFORMER + "cuda_graph_impl=none"],
        [CUTLASS],
    ],
)
def test_what_the_device_can_do_is_taken(overrides):
    assert refused(MOE, *overrides) == {}


def test_kernels_of_transformer_engine_are_refused_where_there_is_none():
    tiny = PRESETS / "tiny-moe" / "cpu.yaml"
    from test_config_rules import TINY_MODEL

    for name in ("moe_permute_fusion", "moe_router_fusion"):
        found = violations(load_config(tiny, None, [f"{TRANSFORMER}{name}=true"]), TINY_MODEL)
        assert [v.rule for v in found] == ["must be false on cpu"]


def test_a_rank_without_the_dispatchers_package_says_so_before_it_builds_a_model(monkeypatch):
    monkeypatch.setattr(layers, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match="needs the package deep_ep"):
        check_dispatcher({"moe_token_dispatcher_type": "flex"})
    check_dispatcher({"moe_token_dispatcher_type": "alltoall"})
    check_dispatcher({})


def test_a_rank_without_the_package_of_its_gated_delta_kernel_says_so(monkeypatch):
    assert refused(NEXT, FLA) == {}
    monkeypatch.setattr(layers, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match="needs the package fla-core"):
        check_gated_delta("fla")
    check_gated_delta("torch")


@pytest.mark.parametrize(("preset", "setting"), [(MOE, CUTLASS), (NEXT, FLA)])
def test_the_plan_counts_the_kernels_that_are_chosen(preset, setting):
    def update(*overrides: str) -> float:
        config = load_config(preset, None, overrides).config
        inputs = PlanInputs.of(config, planning_model_spec(config.model.path)[0], device_for(config))
        return actor_seconds(inputs, batch_plan(config, inputs.train))[1].compute

    assert update(setting) < 0.85 * update()


# --- what mrl init writes and mrl plan --search counts with -----------------------------------------------------------

ON_CLUSTERS = [path for path in sorted(PRESETS.glob("*/*.yaml")) if not path.stem.startswith("cpu")]


def switches_in(config: RunConfig) -> dict[str, Any]:
    """Fields of Megatron and MindSpeed that are on, without what is computed again."""
    given = {TRANSFORMER + name: value for name, value in config.model.override_transformer_config.items()}
    given |= {f"actor.override_ddp_config.{name}": value for name, value in config.actor.override_ddp_config.items()}
    return {key: value for key, value in given.items() if value and not key.startswith(TRANSFORMER + "recompute_")}


def without_switches(config: RunConfig) -> RunConfig:
    return with_values(config, dict.fromkeys(switches_in(config)))


@pytest.mark.parametrize("path", ON_CLUSTERS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_preset_has_the_switches_that_init_writes_and_no_other(path):
    """One that is off in a preset says why on its line."""
    config = load_config(path).config
    model = planning_model_spec(config.model.path)[0]
    assert missing_switches(without_switches(config), model) == switches_in(config)
    off = [line for line in path.read_text(encoding="utf-8").splitlines() if re.match(r" +\w+: false", line)]
    names = {key.rpartition(".")[2] for key in get_hosting(config.cluster.device).switches}
    assert all("  # " in line for line in off if line.split(":")[0].strip() in names)


def test_a_switch_that_is_refused_or_given_is_not_added():
    config, model = load_config(MOE).config, planning_model_spec("Qwen/Qwen3-30B-A3B")[0]
    given = with_values(without_switches(config), {"actor.override_ddp_config.overlap_grad_reduce": False})
    assert set(missing_switches(given, model)) == {
        TRANSFORMER + "apply_rope_fusion",
        TRANSFORMER + "moe_permute_fusion",
    }
    assert missing_switches(with_values(config, {"cluster.device": "cpu"}), model) == {}


def test_a_search_counts_with_the_switches_and_says_so(capsys):
    """The update of every layout is as with them written, and what is found sets them."""
    off = [f"{key}=null" for key in switches_in(load_config(MOE).config)]
    without, with_them = searched(capsys, *off), searched(capsys)
    assert [row["seconds"] for row in without["layouts"]] == [row["seconds"] for row in with_them["layouts"]]
    assert len(without["switches"]) == len(off) and with_them["switches"] == []
    assert set(without["switches"]) <= set(without["run"]["settings"])
    assert without["run"]["best_seconds"] == pytest.approx(with_them["run"]["best_seconds"])
    assert f"counted with: --set {without['switches'][0]}" in "\n".join(search_lines(without))


def test_a_search_names_the_seconds_of_deepep_where_experts_span_nodes():
    config, model = load_config(MOE).config, planning_model_spec("Qwen/Qwen3-30B-A3B")[0]
    problem = search_problem(config, model, device_for(config), 32, 4, MEGATRON)
    report = search_report(config, problem, 10_000)
    ranks = ("expert_model_parallel_size", "expert_tensor_parallel_size")
    for row in report["layouts"]:
        spans = math.prod(row["degrees"].get(key, 1) for key in ranks) > 4
        assert spans == (row["deepep_seconds"] is not None)
        assert not spans or row["deepep_seconds"] <= row["seconds"]
    faster = [row for row in report["layouts"] if row["deepep_seconds"] and row["deepep_seconds"] < row["seconds"]]
    lines = "\n".join(search_lines(report | {"layouts": faster[:1], "switches": [], "run": None}))
    assert f"with DeepEP, which has no pinned build here ({DEEPEP_SET}): {faster[0]['deepep_seconds']:.2f} s" in lines


def searched(capsys, *overrides: str) -> dict[str, Any]:
    settings = [word for override in overrides for word in ("--set", override)]
    main(["plan", "--search", str(MOE), "--json", "--top", "5", *settings])
    return json.loads(capsys.readouterr().out)


# --- docs/efficiency.md -----------------------------------------------------------------------------------------------

ROWS = yaml.safe_load((ROOT / "docs" / "source" / "efficiency.yaml").read_text(encoding="utf-8"))
TABLE = (ROOT / "docs" / "efficiency.md").read_text(encoding="utf-8")
by_switch = pytest.mark.parametrize("row", ROWS, ids=lambda row: row["switch"])


def source_of(file: str) -> Path:
    """In this repository, or in an installed package."""
    first = file.partition("/")[0]
    if first == "mrl":
        return ROOT / file
    (folder, *_) = importlib.util.find_spec(first).submodule_search_locations
    return Path(folder).parent / file


def overrides_of(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def planned(settings: dict[str, Any], preset: str) -> dict[str, Any]:
    """Seconds of an update, and bytes of the phases, of a preset with these settings."""
    config = load_config(PRESETS / f"{preset}.yaml", None, overrides_of(settings)).config
    inputs = PlanInputs.of(config, planning_model_spec(config.model.path)[0], device_for(config))
    seconds = actor_seconds(inputs, batch_plan(config, inputs.train))[1]
    return {"time": seconds, "memory": memory_section(inputs)["phases"]}


@by_switch
def test_what_a_row_names_as_its_source_is_there(row):
    assert row["source"]["word"] in source_of(row["source"]["file"]).read_text(encoding="utf-8")


@by_switch
def test_what_a_row_says_is_refused_is(row):
    for preset, overrides, field in row.get("cases", []):
        resolved = load_config(PRESETS / f"{preset}.yaml", None, overrides.split())
        model = planning_model_spec(resolved.config.model.path)[0]
        assert field in {v.field for v in violations(resolved, model)}, overrides
    assert bool(row.get("cases")) or row["refused"] == "nothing"


@by_switch
def test_the_plan_counts_what_a_row_says_and_nothing_else(row):
    if "set" not in row:
        return
    on, off = (planned(row[way], row.get("of", "qwen3-30b-a3b/h200-4x8")) for way in ("set", "unset"))
    assert [what for what in ("time", "memory") if on[what] != off[what]] == row["plan"]


@by_switch
def test_the_page_names_the_presets_that_a_row_is_on_in(row):
    """By their resolved configuration, asked for here without the generator's own look-up."""
    line = next(line for line in TABLE.splitlines() if line.startswith(f"| {row['switch']} |"))
    for name, config in preset_values().items():
        on = "set" in row and all(_at(config, key) == value for key, value in row["set"].items())
        assert (name in line.split(" | ")[4].split(", ")) == on, name


@cache
def preset_values() -> dict[str, dict[str, Any]]:
    files = sorted(PRESETS.glob("*/*.yaml"))
    return {f"{file.parent.name}/{file.stem}": load_config(file).config.model_dump() for file in files}


def _at(config: dict[str, Any], key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found
