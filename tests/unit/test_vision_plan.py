"""The plan of a run that sees: the tower's weights and FLOPs are those of transformers' module, and each process is
counted with what it holds of it.
"""

import importlib
import json
from pathlib import Path

import pytest
import torch
from small_model import SEEING_WHOLE
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from mrl.config.load import load_config
from mrl.errors import ConfigError
from mrl.model import model_spec
from mrl.model.tower_sizes import VisionTower
from mrl.plan.memory import actor_bytes
from mrl.plan.plan_inputs import PlanInputs, batch_plan, device_for
from mrl.plan.run_plan import plan_of
from mrl.plan.vision_costs import host_bytes, image_tokens, looking_bytes, tower_bytes

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "parallel_configs" / "tiny-vision" / "cpu.yaml"
CLASSES = {
    "qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel", "qwen3_vl": "Qwen3VLVisionModel",
    "qwen3_vl_moe": "Qwen3VLMoeVisionModel", "qwen3_5": "Qwen3_5VisionModel", "qwen3_5_moe": "Qwen3_5MoeVisionModel",
}  # fmt: skip
SMALL = {"depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 128,
         "patch_size": 8}  # fmt: skip


def module(kind: str, sizes: dict) -> torch.nn.Module:
    config = AutoConfig.for_model(kind, vision_config=sizes).vision_config
    name = f"transformers.models.{kind}.modeling_{kind}"
    return getattr(importlib.import_module(name), CLASSES[kind])._from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("sizes", [{}, SMALL], ids=["default", "small"])
@pytest.mark.parametrize("kind", CLASSES)
def test_a_tower_has_the_weights_of_transformers_module(kind, sizes):
    with torch.device("meta"):
        whole = module(kind, sizes)
    tower = VisionTower.of({"model_type": kind, "vision_config": sizes})
    assert tower.parameters == sum(parameter.numel() for parameter in whole.parameters())
    assert tower.features == len(getattr(whole, "deepstack_merger_list", ()))


@pytest.mark.parametrize("kind", CLASSES)
def test_a_pass_has_the_flops_that_torch_counts(kind):
    sizes = SMALL | ({"window_size": 32, "fullatt_block_indexes": [1]} if kind == "qwen2_5_vl" else {})
    if kind.startswith("qwen3_vl"):
        sizes["deepstack_visual_indexes"] = [0, 1]
    whole = module(kind, sizes).eval()
    tower = VisionTower.of({"model_type": kind, "vision_config": sizes})
    rows, columns = 12, 16
    grid = torch.tensor([[1, rows, columns]])
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        whole(torch.zeros(rows * columns, tower.patch_numbers), grid_thw=grid)
    assert counted.get_total_flops() == pytest.approx(tower.flops(rows * columns), rel=0.02)


@pytest.mark.parametrize("key", ["depth", "hidden_size", "deepstack_visual_indexes"])
def test_sizes_that_are_no_numbers_are_refused_by_name(key):
    for value in ("3", None, True, -1):
        with pytest.raises(ConfigError, match=f"vision_config.{key} = "):
            VisionTower.of({"model_type": "qwen3_vl", "vision_config": {key: value}})


def test_features_that_a_class_does_not_have_are_refused_by_name():
    assert VisionTower.of({"model_type": "qwen3_5", "vision_config": {"deepstack_visual_indexes": []}}).features == 0
    with pytest.raises(ConfigError, match=r"deepstack_visual_indexes = .*must be \[\], or left out"):
        VisionTower.of({"model_type": "qwen3_5_moe", "vision_config": {"deepstack_visual_indexes": [1]}})


def whole_model() -> dict:
    return SEEING_WHOLE | {"vision_config": SMALL | {"deepstack_visual_indexes": [0, 1]}}


def planned(*changes: str) -> dict:
    model = model_spec(whole_model())
    config = load_config(TINY, overrides=["model.path=none", *changes]).config
    return plan_of(config, model, device_for(config))


def test_a_run_that_sees_has_the_tower_on_ranks_of_the_first_stage_and_on_workers_and_its_features_on_hosts():
    seeing, blind = planned(), planned("model.vision=null")
    tower = model_spec(whole_model()).tower
    terms = {name: phase["terms"] for name, phase in seeing["memory"]["phases"].items()}
    assert all(terms[name]["vision_tower"] == 4 * tower.parameters for name in ("train", "log_prob", "sync"))
    assert terms["train"]["looking"] == terms["log_prob"]["looking"] and "looking" not in terms["sync"]
    weights = terms["rollout"]["engine_weights"] - blind["memory"]["phases"]["rollout"]["terms"]["engine_weights"]
    assert weights == 4 * tower.parameters
    outside = terms["rollout"]["engine_outside"] - blind["memory"]["phases"]["rollout"]["terms"]["engine_outside"]
    tokens = 8192  # of vLLM's cache and of a pass: its batch, which is more than two longest samples
    features, pixels, passed = 3 * 128, 3 * 2 * 8 * 8, 6 * 64 + 2 * 96  # numbers a token, or a patch
    assert outside == 4 * tokens * (features + 4 * (pixels + passed))
    assert seeing["memory"]["host"]["terms"]["features"] == 4 * 64 * 24 * features  # all prompts at their limit
    flops = {name: seeing["times"]["flops"][name] - blind["times"]["flops"][name] for name in blind["times"]["flops"]}
    looked = 64 * tower.flops(4 * seeing["times"]["mean_prompt_tokens"])
    assert flops == pytest.approx({"log_prob": looked, "update": 0, "generation": looked})
    assert seeing["vision"]["parameters"] == tower.parameters and "vision" not in blind
    assert seeing["reshard"]["bytes_required"] == blind["reshard"]["bytes_required"]


def test_what_a_pass_over_images_takes_is_free_again_while_engines_generate():
    """verl-recipe's infigui-g1/run_3b.sh: Qwen2.5-VL-3B with gpu_memory_utilization 0.7 on 80 GB, its tower trained."""
    own = ("actor.layout.world_size=2", "cluster.n_gpus_per_node=2", "cluster.placement=colocated")
    phases = planned(*own, "model.vision=trained")["memory"]["phases"]
    assert {name for name, phase in phases.items() if "looking" in phase["terms"]} == {
        "train", "log_prob", "rollout_to_log_prob"}  # fmt: skip
    assert phases["train"]["terms"]["looking"] > phases["log_prob"]["terms"]["looking"]


def test_each_replica_looks_at_the_images_of_its_rows_which_may_be_all():
    """64 prompts have 512 responses, of which each of four replicas gets 128: one of each prompt, and more."""
    layout = {"world_size": 4, "tensor_model_parallel_size": 1, "sequence_parallel": "false"}
    words = (*(f"actor.layout.{key}={value}" for key, value in layout.items()), "cluster.n_gpus_per_node=5")
    one, four = planned(), planned(*words)
    assert four["vision"]["flops"] == pytest.approx(4 * one["vision"]["flops"])
    assert four["vision"]["seconds_of_ranks"] == pytest.approx(one["vision"]["seconds_of_ranks"])
    assert four["vision"]["patches_per_second"] == pytest.approx(4 * one["vision"]["patches_per_second"])


@pytest.mark.parametrize(("batched", "prompt", "tokens"), [(512, 24, 512), (64, 124, 256), (8192, 24, 8192)])
def test_an_engine_passes_and_keeps_as_many_tokens_of_images_as_vllm_lets_it(batched, prompt, tokens):
    from vllm.config import SchedulerConfig
    from vllm.v1.core.encoder_cache_manager import compute_mm_encoder_budget

    length = prompt + 4
    scheduler = SchedulerConfig(
        max_model_len=length, is_encoder_decoder=False, max_num_batched_tokens=batched, max_num_seqs=8)  # fmt: skip
    assert compute_mm_encoder_budget(scheduler, {"image": 2 * length}) == (tokens, tokens)
    words = (f"rollout.max_num_batched_tokens={batched}", "rollout.max_num_seqs=8", f"data.max_prompt_length={prompt}",
             "data.max_response_length=4")  # fmt: skip
    assert image_tokens(load_config(TINY, overrides=["model.path=none", *words]).config) == tokens


def test_later_stages_have_no_tower():
    layout = ("actor.layout.world_size=2", "actor.layout.pipeline_model_parallel_size=2", "cluster.n_gpus_per_node=3")
    plan = planned(*layout)
    assert plan["memory"]["phases"]["sync"]["stage"] == 0
    model = model_spec(whole_model())
    config = load_config(TINY, overrides=["model.path=none", *layout]).config
    inputs = PlanInputs.of(config, model, device_for(config))
    batch = batch_plan(config, inputs.train)
    assert all((tower_bytes(inputs, 0), looking_bytes(inputs, batch, 0), host_bytes(inputs, batch, 0)))
    assert not any((tower_bytes(inputs, 1), looking_bytes(inputs, batch, 1), host_bytes(inputs, batch, 1)))


def test_a_critic_of_another_layout_looks_on_each_of_the_ranks_that_have_its_first_stage():
    layout = ("actor.layout.world_size=2", "actor.layout.pipeline_model_parallel_size=2", "cluster.n_gpus_per_node=3")
    own = ("algorithm.adv_estimator=gae", "critic.layout={pipeline_model_parallel_size: 1}")
    config = load_config(TINY, overrides=["model.path=none", *layout, *own]).config
    inputs = PlanInputs.of(config, model_spec(whole_model()), device_for(config))
    later = actor_bytes(inputs, batch_plan(config, inputs.train), 1)
    assert not later.looking and later.vision_tower == 4 * inputs.tower.parameters
    assert later.critic.looking == looking_bytes(
        inputs.critic, batch_plan(inputs.critic.config, inputs.critic.train), 0
    )
    assert later.critic.looking > 0


@pytest.mark.parametrize("part", ["trained", "projector"])
def test_a_tower_that_is_trained_has_gradients_and_moments_and_is_looked_through_again_in_each_update(part):
    frozen, trained = planned(), planned(f"model.vision={part}")
    tower = model_spec(whole_model()).tower
    before, after = (plan["memory"]["phases"]["train"]["terms"] for plan in (frozen, trained))
    more = {name: after[name] - before[name] for name in ("parameters", "gradients", "optimizer")}
    aligned = 64 * 4 * 80  # each of its tensors begins at a multiple of 64 numbers
    for name, numbers in {"parameters": 1, "gradients": 1, "optimizer": 2}.items():  # float32 is its own master
        assert 0 <= more[name] - numbers * 4 * tower.parameters < numbers * aligned, name
    flops = {name: each - frozen["times"]["flops"][name] for name, each in trained["times"]["flops"].items()}
    looked = 64 * tower.flops(4 * frozen["times"]["mean_prompt_tokens"])
    updates = trained["batch"]["updates_per_step"]
    assert flops == pytest.approx({"log_prob": 0, "update": (4 - 1 / updates) * looked, "generation": 0})
    with_reference = planned(f"model.vision={part}", "algorithm.use_kl_loss=true")
    blind = planned("model.vision=null", "algorithm.use_kl_loss=true")
    assert with_reference["times"]["flops"]["ref"] - blind["times"]["flops"]["ref"] == pytest.approx(looked)
    moved = trained["reshard"]["bytes_required"] - frozen["reshard"]["bytes_required"]
    assert moved == 4 * tower.parameters * len(trained["layout"]["workers"])


def test_images_of_tools_and_agents_are_counted_up_to_what_a_sample_holds():
    """64 prompts of 24 tokens, 8 responses each."""
    response = 40
    turns = ["rollout.turns={tools: [picture], path: tools.py}"]
    agent = ["rollout.turns={network: true}", "rollout.agent={command: [agent]}"]
    found = {}
    for name, words in {"prompts": [], "tools": turns, "agents": agent}.items():
        plan = planned(f"data.max_response_length={response}", *words)
        config = load_config(TINY, overrides=["model.path=none", f"data.max_response_length={response}", *words]).config
        inputs = PlanInputs.of(config, model_spec(whole_model()), device_for(config))
        batch = batch_plan(config, inputs.train)
        found[name] = (
            plan["memory"]["host"]["terms"]["features"],
            looking_bytes(inputs, batch, 0),
            plan["vision"]["most_tokens_of_a_sample"],
        )
    token = 4 * 3 * 128  # bytes of an image token's features
    patch = 4 * (3 * 2 * 8 * 8 + 6 * 64 + 2 * 96)
    assert [each[2] for each in found.values()] == [24, 24 + response, 24 + response]
    assert found["prompts"][0] == 64 * 24 * token
    assert found["tools"][0] == (64 * 24 + 512 * response) * token
    assert found["agents"][0] == 512 * (24 + response) * token  # each writes prompts of its own
    most = max(batch.micro.tokens, batch.log_prob_micro.tokens)
    rows = max(batch.micro.rows, batch.log_prob_micro.rows)
    of_prompts = rows * 24 * token + 24 * 4 * patch
    assert found["prompts"][1] == of_prompts
    more = (most - rows * 24) * token + (response - 24) * 4 * patch  # the largest image fills a response
    assert found["tools"][1] == found["agents"][1] == of_prompts + more


@pytest.mark.parametrize("replicas", [1, 4])
def test_time_is_counted_for_images_of_answers_each_of_which_one_replica_and_one_engine_see_once(replicas):
    """64 prompts, 8 responses each: 512 rows have an image of their own, or are images throughout."""
    layout = {"world_size": replicas, "tensor_model_parallel_size": 1, "sequence_parallel": "false"}
    given = [f"actor.layout.{key}={value}" for key, value in layout.items()]
    given += [f"cluster.n_gpus_per_node={replicas + 1}", "data.max_response_length=40"]
    tower = model_spec(whole_model()).tower
    plain = planned(*given)
    tools = planned(*given, "rollout.turns={tools: [picture], path: tools.py}")
    agents = planned(*given, "rollout.turns={network: true}", "rollout.agent={command: [agent]}")
    text = planned(*given, "rollout.turns={tools: [calculator]}")
    assert text["vision"] == plain["vision"], "the calculator shows nothing"
    prompt, response = (plain["times"][f"mean_{name}_tokens"] for name in ("prompt", "response"))
    of_prompts = 64 * tower.flops(4 * prompt)
    of_answers = 512 * tower.flops(4 * response)
    of_samples = 512 * tower.flops(4 * (prompt + response))
    assert [plan["vision"]["tokens_of_a_response"] for plan in (plain, tools, agents)] == [0, response, response]
    for plan, ranks, engines in (
        (plain, replicas * of_prompts, of_prompts),  # each replica has a response to each prompt
        (tools, replicas * of_prompts + of_answers, of_prompts + of_answers),
        (agents, of_samples, of_samples),
    ):
        vision = plan["vision"]
        assert vision["flops"] == pytest.approx(ranks)
        for seconds, flops, of_plain in (
            ("seconds_of_ranks", ranks, replicas * of_prompts),
            ("seconds_of_engines", engines, of_prompts),
        ):
            assert vision[seconds] / plain["vision"][seconds] == pytest.approx(flops / of_plain)
        more = plan["times"]["flops"]["log_prob"] - plain["times"]["flops"]["log_prob"]
        assert more == pytest.approx(ranks - replicas * of_prompts, abs=1e-6 * ranks)


def test_under_a_token_budget_a_micro_batch_may_be_prompts_alone():
    given = ["actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=288", "data.max_response_length=8"]
    config = load_config(TINY, overrides=["model.path=none", *given]).config
    inputs = PlanInputs.of(config, model_spec(whole_model()), device_for(config))
    token, patch = 4 * 3 * 128, 4 * (3 * 2 * 8 * 8 + 6 * 64 + 2 * 96)
    expected = 12 * 24 * token + 24 * 4 * patch  # twelve prompts of 24 tokens, no response
    assert looking_bytes(inputs, batch_plan(config, inputs.train), 0) == expected


def test_a_plan_is_plain_data():
    assert json.loads(json.dumps(planned()))["vision"]["tokens_of_a_prompt"] > 0
