"""Switches that make an update faster: what refuses each, and docs/efficiency.md row by row."""

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrl.config.load import load_config
from mrl.config.rules import violations
from mrl.errors import EnvironmentFault
from mrl.model import planning_model_spec
from mrl.plan.memory import memory_section
from mrl.plan.plan_inputs import PlanInputs, batch_plan, device_for
from mrl.plan.times import actor_seconds
from mrl.platforms import layers
from mrl.platforms.layers import check_dispatcher

ROOT = Path(__file__).parents[2]
PRESETS = ROOT / "parallel_configs"
MOE, DENSE = PRESETS / "qwen3-30b-a3b" / "h100-4x8.yaml", PRESETS / "qwen3-8b" / "h100-1x8.yaml"
A2 = PRESETS / "qwen3-30b-a3b" / "a2-4x8.yaml"
TRANSFORMER = "model.override_transformer_config."
DISPATCHER = TRANSFORMER + "moe_token_dispatcher_type=flex"


def refused(preset: Path, *overrides: str) -> dict[str, str]:
    """Field, without what all have before it -> the rule that it breaks."""
    resolved = load_config(preset, None, overrides)
    model = planning_model_spec(resolved.config.model.path)[0]
    return {v.field.removeprefix(TRANSFORMER): v.rule for v in violations(resolved, model)}


@pytest.mark.parametrize(
    ("preset", "overrides", "field", "said"),
    [
        (A2, [DISPATCHER], "moe_token_dispatcher_type", "alltoall on npu"),
        (MOE, [DISPATCHER, "actor.layout.expert_model_parallel_size=1"], "moe_token_dispatcher_type", "several ranks"),
        (MOE, [TRANSFORMER + "moe_flex_dispatcher_backend=deepep"], "moe_flex_dispatcher_backend", "type: flex"),
        (MOE, [DISPATCHER, TRANSFORMER + "moe_flex_dispatcher_backend=nvshmem"], "moe_flex_dispatcher_backend",
         "unknown"),
        (MOE, [DISPATCHER, TRANSFORMER + "moe_flex_dispatcher_backend=hybridep",
               TRANSFORMER + "moe_enable_deepep=true"], "moe_flex_dispatcher_backend", "must be deepep"),
        (A2, [TRANSFORMER + "moe_router_fusion=true"], "moe_router_fusion", "false on npu"),
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


def planned(settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds of an update, and bytes of the phases, of a preset with these settings."""
    config = load_config(PRESETS / "qwen3-30b-a3b" / "h200-4x8.yaml", None, overrides_of(settings)).config
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
    on, off = planned(row["set"]), planned(row["unset"])
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
