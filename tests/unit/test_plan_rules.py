"""A share of the memory that cannot fit beside the actor is refused, with the number that does;
so `mrl plan` agrees.
"""

import json
import re
from pathlib import Path

import pytest
from small_model import write_model

from mrl.cli.main import main
from mrl.config.load import load_config
from mrl.model import planning_model_spec
from mrl.plan.devices import find_device
from mrl.plan.engine_memory import GRAPHS
from mrl.plan.memory import memory_section
from mrl.plan.plan_inputs import PlanInputs, engine_of
from mrl.plan.plan_rules import share_violations
from mrl.units import GIB

PRESETS = Path(__file__).parents[2] / "parallel_configs"
PRESET = PRESETS / "qwen3-30b-a3b" / "h100-4x8.yaml"
STAYS = ["actor.param_offload=false", "actor.grad_offload=false", "actor.optimizer_offload=false"]  # 40 GiB of 77


def refused(*overrides: str, path: Path = PRESET) -> list:
    resolved = load_config(path, None, list(overrides))
    return share_violations(resolved, planning_model_spec(resolved.config.model.path)[0])


def fits(share: float, *overrides: str) -> bool:
    config = load_config(PRESET, None, [*overrides, f"rollout.gpu_memory_utilization={share}"]).config
    model, _ = planning_model_spec(config.model.path)
    return memory_section(PlanInputs.of(config, model, find_device("h100-80g")))["phases"]["rollout"]["fits"]


def test_the_share_that_is_named_fits_and_one_more_hundredth_does_not():
    (violation,) = refused(*STAYS, "rollout.gpu_memory_utilization=0.9")
    (most,) = violation.allowed
    assert violation.field == "rollout.gpu_memory_utilization" and violation.value == 0.9
    assert violation.rule == f"must be at most {most}" and "GiB on the device while engines generate" in violation.why
    assert fits(most, *STAYS) and not fits(round(most + 0.01, 2), *STAYS)
    assert refused(*STAYS, f"rollout.gpu_memory_utilization={most}") == []


def test_where_no_share_fits_the_way_out_is_named():
    whole = ["rollout.data_parallel_size=1", "rollout.expert_parallel_size=1", "rollout.num_engines=32"]
    (violation,) = refused(*STAYS, "rollout.gpu_memory_utilization=0.9", *whole)
    assert violation.allowed == () and "cannot fit" in violation.rule and "actor.optimizer_offload" in violation.why


@pytest.mark.parametrize(
    "preset", ["qwen3-235b-a22b/h100-16x8", "qwen3.5-35b-a3b/h100-4x8", "qwen3-30b-a3b/h100-4x8-separate"]
)
def test_a_share_that_leaves_no_cache_is_refused_with_one_that_does(preset):
    """Caches are those of each data-parallel rank, and states of gated delta attention come off them first."""
    path = PRESETS / f"{preset}.yaml"
    (violation,) = refused("rollout.gpu_memory_utilization=0.1", path=path)
    (enough,) = violation.allowed
    assert "leaves no cache for one longest sequence" in violation.rule and violation.value == 0.1
    assert refused(f"rollout.gpu_memory_utilization={enough}", path=path) == []
    assert refused(f"rollout.gpu_memory_utilization={round(enough - 0.01, 2)}", path=path) != []


def test_states_behind_drafted_tokens_are_part_of_the_share_that_is_enough():
    path = PRESETS / "qwen3.5-35b-a3b" / "h100-4x8.yaml"
    found = []
    for drafts in ([], ["rollout.speculation={method: ngram, tokens: 3}"]):
        (violation,) = refused("rollout.gpu_memory_utilization=0.1", *drafts, path=path)
        (enough,) = violation.allowed
        assert refused(f"rollout.gpu_memory_utilization={enough}", *drafts, path=path) == []
        assert refused(f"rollout.gpu_memory_utilization={round(enough - 0.01, 2)}", *drafts, path=path) != []
        found.append(enough)
    assert found[1] > found[0]


def test_where_the_actor_alone_is_more_than_the_device_no_share_is_named():
    path = PRESETS / "qwen3-235b-a22b" / "h100-16x8.yaml"
    (violation,) = refused("actor.layout={world_size: 128}", *STAYS, path=path)  # 235e9 weights on every rank
    assert violation.allowed == () and "cannot fit" in violation.rule


def test_a_device_of_its_own_cannot_be_given_whole():
    separate = PRESETS / "qwen3-30b-a3b" / "h100-4x8-separate.yaml"
    (violation,) = refused("rollout.gpu_memory_utilization=1.0", path=separate)
    (most,) = violation.allowed
    assert refused(f"rollout.gpu_memory_utilization={most}", path=separate) == []


def test_an_engine_needs_weights_a_pass_graphs_and_one_sequence():
    whole = ["rollout.data_parallel_size=1", "rollout.expert_parallel_size=1", "rollout.num_engines=32"]
    words = {}
    for eager in ("true", "false"):
        overrides = [*STAYS, "rollout.gpu_memory_utilization=0.9", *whole, f"rollout.enforce_eager={eager}"]
        (violation,) = refused(*overrides)
        words[eager] = float(re.search(r"an engine needs ([\d.]+) GiB", violation.rule)[1])
    config = load_config(PRESET, None, [*STAYS, *whole]).config
    inputs = PlanInputs.of(config, planning_model_spec(config.model.path)[0], find_device("h100-80g"))
    engine = engine_of(inputs)
    sequence = memory_section(inputs)["kv_cache"]["bytes_per_token"] * config.data.max_sample_length
    assert words["false"] == pytest.approx((engine.weights + engine.working_set + GRAPHS + sequence) / GIB, abs=0.05)
    assert words["false"] - words["true"] == pytest.approx(GRAPHS / GIB, abs=0.11)


def test_devices_of_their_own_have_room_for_any_share_and_so_has_a_cpu(tmp_path):
    assert (
        refused("rollout.gpu_memory_utilization=0.95", path=PRESETS / "qwen3-30b-a3b" / "h100-4x8-separate.yaml") == []
    )
    write_model(tmp_path / "model")
    assert refused(f"model.path={tmp_path / 'model'}", path=PRESETS / "tiny-moe" / "cpu.yaml") == []


def test_a_device_that_is_not_named_may_be_the_largest_of_its_kind():
    assert refused(*STAYS, "cluster.accelerator=null", "rollout.gpu_memory_utilization=0.65") == []
    assert refused(*STAYS, "rollout.gpu_memory_utilization=0.65") != []


@pytest.mark.parametrize("path", sorted(PRESETS.glob("qwen*/*.yaml")), ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_no_preset_is_refused(path):
    assert refused(path=path) == []


def test_validate_says_it_in_its_list(capsys):
    arguments = [part for text in (*STAYS, "rollout.gpu_memory_utilization=0.9") for part in ("--set", text)]
    with pytest.raises(SystemExit) as end:
        main(["validate", str(PRESET), *arguments, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert end.value.code == 2 and not answer["ok"]
    assert [row["field"] for row in answer["violations"]] == ["rollout.gpu_memory_utilization"]
