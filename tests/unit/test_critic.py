"""A critic around its formulas: what goes with it, its cut, its parts of a step, of a plan and of a checkpoint."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from replicas import ReplicaActor, ReplicaCritic, Replicas, scored_step, stored, trained_of
from test_step_batch import noise, rollouts_of, samples
from whole_batch import rows_of

from mrl.algo.losses import kl_in_reward
from mrl.checkpoint.disk_space import checkpoint_bytes
from mrl.checkpoint.manifest import CRITIC, Manifest, RankFiles, described, facts_of, read_manifest, write_manifest
from mrl.config.load import ResolvedConfig, load_config
from mrl.config.rules import violations
from mrl.config.schema import RunConfig
from mrl.driver.resume import RunIdentity, find_resume_point
from mrl.driver.step_batch import StepBatch
from mrl.errors import ConfigError, DamagedCheckpoint, NumericAbort
from mrl.generate.rollouts import compared
from mrl.model import model_spec, parameter_count, planning_model_spec
from mrl.model.critic_weights import HEAD, critic_count, critic_shards
from mrl.model.layout import TrainLayout
from mrl.model.registry import known_hf_config
from mrl.plan.host_memory import save_bytes
from mrl.plan.memory import actor_bytes, memory_section
from mrl.plan.plan_inputs import PlanInputs, batch_plan, device_for, engine_of
from mrl.plan.times import phase_seconds
from mrl.rank import rank_step
from mrl.rank.rank_batch import RankBatch
from mrl.reward.items import LEFT_OUT, OK, RewardResult
from mrl.tools.import_verl.translate import import_overrides, import_script
from mrl.tools.rehearse.compose import WorkFolder, compose
from mrl.tools.rehearse.small_model import small_hf_config

TINY = "parallel_configs/tiny-moe/cpu.yaml"
BASE = "parallel_configs/qwen3-30b-a3b/h100-4x8.yaml"
MOE = planning_model_spec("Qwen/Qwen3-30B-A3B")[0]
TIED = planning_model_spec("Qwen/Qwen2.5-3B-Instruct")[0]
GAE = "algorithm.adv_estimator=gae"
SIZES = ("data.train_batch_size=6", "rollout.n=4", "actor.ppo_mini_batch_size=2", "data.max_response_length=64")


def config_of(*overrides: str) -> RunConfig:
    return load_config(TINY, "ppo", [*SIZES, *overrides]).config


DEGREES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
}


def of_critic(ranks: int, **degrees: int) -> str:
    """A layout of the critic's own that takes none of these degrees from the actor's."""
    named = dict(tp=1, pp=1, cp=1) | degrees
    given = {"world_size": ranks, "expert_model_parallel_size": 1}
    given |= {DEGREES[name]: size for name, size in named.items()}
    return f"critic.layout={json.dumps(given)}"


# ---------------------------------------------------------------- rules


def broken(*overrides: str, base: str = TINY, recipe: str | None = "ppo"):
    return violations(load_config(base, recipe, list(overrides)), MOE)


def test_the_recipe_is_legal():
    assert broken() == []


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        (("critic.ppo_mini_batch_size=7",), "critic.ppo_mini_batch_size", "must divide data.train_batch_size"),
        (("critic.optim.lr_warmup_steps=5", "critic.optim.lr_decay_steps=5"), "critic.optim.lr_decay_steps", "more"),
        (("critic.optim.min_lr=1",), "critic.optim.min_lr", "at most critic.optim.lr"),
        (("critic.ppo_max_token_len_per_gpu=4096",), "critic.ppo_max_token_len_per_gpu", "use_dynamic_bsz"),
        (("critic.forward_max_token_len_per_gpu=9",), "critic.forward_max_token_len_per_gpu", "use_dynamic_bsz"),
        (("trainer.total_training_steps=3", "trainer.critic_warmup=4"), "trainer.critic_warmup", "at most"),
        (("critic.optim.override_optimizer_config={adam_eps: 1}",), "critic.optim.override_optimizer_config", "empty"),
        (("critic.loss_agg_mode=seq-mean-token-sum-norm",), "critic.loss_agg_mode", "unknown name"),
        (("critic.layout={world_size: 4}",), "critic.layout.world_size", "must be actor.layout.world_size = 2"),
        (
            (of_critic(2, pp=2, vpp=5),),
            "critic.layout.virtual_pipeline_model_parallel_size",
            "must divide the layers",
        ),
        (
            (of_critic(2), "data.train_batch_size=3", "rollout.n=1", "actor.ppo_mini_batch_size=3"),
            "critic.ppo_mini_batch_size",
            "the data-parallel size 2",
        ),
        (
            (
                of_critic(2),
                "model.override_transformer_config={moe_token_dispatcher_type: flex}",
                "cluster.device=cuda",
            ),
            "model.override_transformer_config.moe_token_dispatcher_type",
            "(in critic.layout)",
        ),
        (
            (of_critic(2, cp=2), "cluster.device=npu"),
            "critic.layout",
            "actor's context_parallel_size",
        ),
    ],
)
def test_what_does_not_go_with_a_critic_is_one_message(overrides, field, words):
    (violation,) = broken(*overrides)
    assert violation.field == field and words in str(violation)


def test_a_layout_says_what_differs_from_the_actors():
    actor = [
        "actor.layout={world_size: 32, tensor_model_parallel_size: 4, expert_model_parallel_size: 8, "
        "pipeline_model_parallel_size: 2, num_layers_in_first_pipeline_stage: 3, sequence_parallel: true}"
    ]

    def differing(**own) -> dict:
        config = load_config(TINY, "ppo", [*actor, f"critic.layout={json.dumps(own)}"]).config
        of_actor, of_critic = (part.layout.model_dump() for part in (config.actor, config.critic))
        return {name: of_critic[name] for name in of_actor if of_critic[name] != of_actor[name]}

    assert differing(world_size=32) == {}
    assert differing(expert_model_parallel_size=4) == {"expert_model_parallel_size": 4}
    assert differing(tensor_model_parallel_size=2) == {"tensor_model_parallel_size": 2, "sequence_parallel": None}
    one_stage = {"pipeline_model_parallel_size": 1, "num_layers_in_first_pipeline_stage": None}
    assert differing(pipeline_model_parallel_size=1) == one_stage
    other_stages = {"num_layers_in_first_pipeline_stage": None, "pipeline_layers": (4, 6)}
    assert differing(pipeline_layers=[4, 6]) == other_stages


@pytest.mark.parametrize(
    "overrides",
    [
        ("critic.optim.lr=1e-4",),
        (of_critic(2),),
        ("critic.cliprange_value=0.2", "trainer.critic_warmup=5"),
        ("algorithm.lam=0.9",),
    ],
)
def test_what_is_said_of_a_critic_that_nobody_reads_is_one_message(overrides):
    (violation,) = broken(*overrides, recipe="grpo")
    assert violation.field == "algorithm.adv_estimator" and violation.allowed == ("gae",)
    assert overrides[0].partition("=")[0].partition(".")[0] in violation.rule


def test_the_actors_mistakes_are_not_told_again_of_the_critic():
    fields = [violation.field for violation in broken("actor.ppo_mini_batch_size=7")]
    assert fields == ["actor.ppo_mini_batch_size"]


def test_the_critics_section_in_the_actors_place():
    config = config_of("critic.optim.lr=3e-5", "critic.ppo_micro_batch_size_per_gpu=3", "critic.param_offload=true")
    own = config.of_critic.actor
    assert (own.optim.lr, own.ppo_micro_batch_size_per_gpu, own.offloaded) == (3e-5, 3, ("param_offload",))
    assert own.layout == config.actor.layout and own.ppo_mini_batch_size == config.actor.ppo_mini_batch_size
    assert load_config(TINY, "grpo", []).config.of_critic is None
    apart = config_of("critic.layout={world_size: 2, pipeline_model_parallel_size: 2}", "ref.path=/models/reference")
    assert apart.of_critic.actor.layout == apart.critic.layout != apart.actor.layout
    assert apart.of_critic.ref.path is None


def test_the_actors_schedule_is_as_long_as_it_is_trained():
    config = config_of("trainer.total_training_steps=10", "trainer.critic_warmup=4")
    assert config.total_updates == 7 * 3 and config.of_critic.total_updates == 10 * 3


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("model", [TIED, MOE], ids=lambda model: model.family)
def test_ranks_of_a_critic_hold_each_weight_once_and_a_head_in_place_of_the_output_layer(model, ranks):
    parts = min(ranks, 2)
    degrees = {"world_size": ranks, "tensor_model_parallel_size": parts, "pipeline_model_parallel_size": parts}
    degrees |= {"expert_model_parallel_size": 1, "sequence_parallel": ranks > 1}
    layout = TrainLayout.build(degrees, model)
    elements = {}
    for rank in range(layout.world_size):
        for shard in critic_shards(model, layout, rank):
            assert rank in shard.replicas
            for piece in shard.pieces if shard.primary == rank else ():
                elements[piece.hf_name] = elements.get(piece.hf_name, 0) + int(np.prod(piece.hf_box.shape))
    assert elements[HEAD] == model.hidden_size and "lm_head.weight" not in elements
    assert sum(elements.values()) == critic_count(model)
    vocabulary = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    assert critic_count(model) == parameter_count(model) - vocabulary + model.hidden_size


# ---------------------------------------------------------------- a step


class KeptBatch(RankBatch):
    """Keeps the columns that go with what the critic is trained on."""

    def returns(self, numbers):
        self.kept = self.batch
        return super().returns(numbers)


@pytest.fixture(autouse=True)
def keeping(monkeypatch):
    monkeypatch.setattr(rank_step, "RankBatch", KeptBatch)


def step_of(replicas: int, *overrides: str, value=None, judged=None):
    config = config_of("algorithm.gamma=0.9", "algorithm.lam=0.8", *overrides)
    actor = Replicas(config, replicas, lambda own: noise(own, 1000), lambda own: noise(own, 2000))
    layout = actor.critic_layout
    for rank, each in enumerate(actor.actors):
        place = layout.dense_coords(rank)
        is_last = place.pp == layout.pipeline - 1
        each.critic = ReplicaCritic(
            value or (lambda own: noise(own, 3000)), is_last, is_last and place.tp == place.cp == 0
        )
    rollouts = rollouts_of(stored(samples()))
    if judged is not None:
        rollouts = replace(rollouts, results=judged(rollouts.results))
    step, scored = scored_step(actor, rollouts)
    held = [step.cut.needed_rows(replica) for replica in range(replicas)]
    return (
        step,
        actor,
        rollouts,
        scored.metrics,
        {name: actor.of_tokens(name, held) for name in ("advantages", "returns", "critic_values")},
    )


KL = ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.1")


@pytest.mark.parametrize("overrides", [(), KL, (*KL, "algorithm.overlong_filter=true")])
def test_advantages_of_a_step_are_estimated_over_whole_responses_and_whitened_over_trained_tokens(overrides):
    """As verl does it: the score at the end, each token's KL taken off, all tokens estimated, trained ones whitened."""
    *_, rollouts, metrics, columns = step_of(3, *overrides)
    made = rollouts.samples.read()
    own, lengths = made.rollout_log_probs, made.response_lengths
    values = noise(own, 3000).astype(np.float64)
    rewards = np.zeros(len(own))
    if overrides:
        rewards -= 0.1 * kl_in_reward(own + noise(own, 1000), own + noise(own, 2000), "kl")
    rewards[np.cumsum(lengths) - 1] += rollouts.rewards
    found = []
    for reward, value in zip(rows_of(rewards, lengths), rows_of(values, lengths), strict=True):
        after = gathered = 0.0
        row = np.zeros(len(value))
        for t in range(len(value) - 1, -1, -1):
            gathered = row[t] = reward[t] + 0.9 * after - value[t] + 0.9 * 0.8 * gathered
            after = value[t]
        found.append(row)
    expected = np.concatenate(found)
    mask = np.ones(len(own), bool)
    if "algorithm.overlong_filter=true" in overrides:
        mask = ~np.repeat(made.truncated, lengths)
    trained = expected[mask]
    whitened = (expected - trained.mean()) / np.sqrt(trained.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(columns["advantages"], np.where(mask, whitened, 0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(columns["returns"], expected + values, rtol=1e-5, atol=1e-6)
    assert metrics["critic/returns/mean"] == pytest.approx((expected + values)[mask].mean())
    assert metrics["critic/values/max"] == pytest.approx(values[mask].max())
    assert metrics["critic/advantages/mean"] == pytest.approx(0.0, abs=1e-6)


OTHERS = [
    (2, of_critic(2, pp=2)),
    (4, of_critic(4, tp=2)),
    (4, of_critic(4, tp=2, pp=2)),
    (4, of_critic(4, cp=2)),
    (2, "critic.ppo_mini_batch_size=1"),
]  # fmt: skip


@pytest.mark.parametrize(("replicas", "layout"), [(2, None), (5, None), *OTHERS])
def test_estimates_have_the_same_bits_wherever_rows_lie(replicas, layout):
    *_, metrics, columns = step_of(1, *KL)
    *_, others, parts = step_of(replicas, *KL, *filter(None, [layout]))
    assert others == metrics
    for name, values in columns.items():
        np.testing.assert_array_equal(parts[name], values, err_msg=name)


@pytest.mark.parametrize(("replicas", "layout"), OTHERS)
def test_a_critic_of_another_layout_is_updated_with_the_actors_returns_of_its_own_rows(replicas, layout):
    """Each replica's rows of each mini-batch, whole on each of its ranks of the last stage, and no row twice."""
    step, actor, _, _, columns = step_of(replicas, "algorithm.overlong_filter=true", layout)
    metrics = step.update_critic()
    trained = trained_of(actor)
    assert metrics["critic/vf_loss"] == 1.0
    cut = step.critic_cut
    lengths = step.rows.response_lengths
    kept = trained > 0
    assert not kept.all()
    seen = []
    for rank, each in enumerate(actor.actors):
        place = actor.critic_layout.dense_coords(rank)
        ((batch, mini_batches, counts),) = each.critic.updates
        held = cut.needed_rows(place.dp)
        assert [count.tokens for count in counts] == [int(trained[rows].sum()) for rows in cut.rows]
        rows = np.concatenate([held[micro.rows] for part in mini_batches for micro in part if not micro.is_filler])
        if place.tp == place.cp == place.pp == 0:
            seen += rows.tolist()
        expected = {name: rows_of(columns[name], lengths) for name in ("returns", "critic_values")}
        for number, row in enumerate(held):
            own = batch.token_indices(np.array([number]))
            np.testing.assert_array_equal(batch.loss_mask[own], kept[row])
            np.testing.assert_array_equal(batch.returns[own], expected["returns"][row])
            if each.critic.on_last_stage and row in rows:
                np.testing.assert_array_equal(batch.critic_values[own], expected["critic_values"][row])
    assert sorted(seen) == list(range(len(lengths)))


def test_values_that_are_no_numbers_end_the_step():
    with pytest.raises(NumericAbort, match="values of the critic are not finite"):
        step_of(2, value=lambda own: np.where(np.arange(len(own)) == 0, np.nan, own))


def test_a_critic_is_updated_with_all_rows_before_the_actor_and_then_lets_go_of_its_columns():
    step, actor, *_ = step_of(3)
    metrics = step.update_critic()
    assert metrics["critic/vf_loss"] == 1.0
    for each, batch in zip(actor.actors, actor.batches, strict=True):
        ((given, mini_batches, counts),) = each.critic.updates
        assert given.critic_values is not None and given.returns is not None and len(mini_batches) == len(counts) == 3
        assert batch.batch.critic_values is None and batch.batch.returns is None
    assert sum(count.tokens for count in counts) == int(trained_of(actor).sum())


def test_a_response_whose_group_failed_is_trained_on_where_a_critic_judges_it():
    """Of group 0 the environment failed but once; a group's mean would say nothing of the one that is left."""
    ids = np.repeat([0, 1], 4)
    reasons = [LEFT_OUT, OK, LEFT_OUT, LEFT_OUT, OK, OK, LEFT_OUT, OK]
    results = [RewardResult(number, 1.0, {}, reason) for number, reason in enumerate(reasons)]
    judged = [reason == OK for reason in reasons]
    assert compared(ids, results, by_group=False).tolist() == judged
    assert compared(ids, results).tolist() == [False] * 4 + judged[4:]

    def lonely(results):
        return [replace(each, reason=LEFT_OUT) if n in (1, 2, 3) else each for n, each in enumerate(results)]

    step, actor, *_ = step_of(2, judged=lonely)
    trained = trained_of(actor)
    assert trained[0] == step.rows.response_lengths[0] and not trained[1:4].any()


def test_a_step_that_trains_the_critic_alone_lets_the_rows_go():
    step, actor, *_ = step_of(2)
    assert step.leave_actor() == {"actor/updates": 0.0, "actor/skipped_updates": 0.0}
    assert not actor.batches


@pytest.mark.parametrize("mini", [1, 2, 3, 6])
def test_every_row_is_in_each_pass_of_a_critic_once_and_where_the_actor_has_it_if_mini_batches_are_whole(mini):
    step = StepBatch(Replicas(config_of(f"critic.ppo_mini_batch_size={mini}"), 3), stored(samples()), 1)
    critic = step.critic_cut
    assert len(critic.mini_batches) == 6 // mini
    seen = []
    for replica in range(3):
        of_updates = [micro.rows for part in critic.mini_batches for micro in part[replica] if not micro.is_filler]
        of_values = [micro.rows for micro in critic.log_probs[replica] if not micro.is_filler]
        joined = [sorted(np.concatenate(rows).tolist()) for rows in (of_updates, of_values)]
        assert joined[0] == joined[1]
        if mini % 2 == 0:
            assert joined[0] == step.cut.own_rows(replica).tolist()
        seen += joined[0]
        for part, rows in zip(critic.mini_batches, critic.rows, strict=True):
            inside = np.concatenate([micro.rows for micro in part[replica]])
            assert np.isin(inside, rows).all()
    assert sorted(seen) == list(range(24))
    assert all(len({len(share) for share in part}) == 1 for part in critic.mini_batches)


@pytest.mark.parametrize("mini", [1, 2, 3, 6])
@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_train_a_critic_on_equally_many_rows_as_planned(replicas, mini):
    """Also where the actor's rows lie unevenly in mini-batches that are smaller, or cut across the actor's."""
    config = config_of(f"critic.ppo_mini_batch_size={mini}")
    actor = Replicas(config, replicas)
    planned_rows = batch_plan(config.of_critic, actor.critic_layout).samples_per_rank
    for part in StepBatch(actor, stored(samples()), 1).critic_cut.mini_batches:
        assert [sum(len(micro.rows) for micro in share if not micro.is_filler) for share in part] == [
            planned_rows
        ] * replicas


def test_a_replica_without_a_critic_is_cut_as_before():
    plain = load_config(TINY, "grpo", list(SIZES)).config
    step = StepBatch(Replicas(plain, 2), stored(samples()), 1)
    assert step.critic_cut is None
    assert not hasattr(ReplicaActor(plain), "critic")


# ---------------------------------------------------------------- plan


def inputs_of(*overrides: str) -> PlanInputs:
    config = load_config(BASE, None, list(overrides)).config
    return PlanInputs.of(config, MOE, device_for(config))


def planned(*overrides: str) -> dict:
    inputs = inputs_of(*overrides)
    config = inputs.config
    seconds = phase_seconds(inputs, batch_plan(config, inputs.train), engine_of(inputs))
    return {"memory": memory_section(inputs), "seconds": seconds}


def test_a_plan_counts_the_critic_on_devices_on_hosts_and_in_time():
    plain = planned("algorithm.adv_estimator=grpo")
    plan = planned(GAE)
    phases = plan["memory"]["phases"]
    assert {"values", "critic"} <= phases.keys() and not {"values", "critic"} & plain["memory"]["phases"].keys()
    state = sum(phases["train"]["terms"][name] for name in ("parameters", "gradients", "optimizer"))
    whole = phases["critic"]["terms"]["critic"]
    assert 0.9 * state < whole <= state  # without an output layer
    assert phases["train"]["terms"]["critic"] == whole  # nothing of it leaves
    values = phases["values"]["terms"]
    assert values["batch"] == phases["log_prob"]["terms"]["batch"]  # of the same micro-batches
    assert values["log_prob"] == phases["log_prob"]["terms"]["log_prob"]
    seconds = plan["seconds"]
    inputs = inputs_of(GAE)
    without = replace(inputs, assumptions=replace(inputs.assumptions, logit_passes=0.0))
    update = phase_seconds(without, batch_plan(without.config, without.train), engine_of(without))["update"]
    assert seconds["critic"] == pytest.approx(update, rel=1e-9) and update < seconds["update"]  # it has no logits
    assert plan["memory"]["host"]["terms"]["save"] > 1.8 * plain["memory"]["host"]["terms"]["save"]


def test_a_plan_counts_a_critic_in_its_own_layout():
    """As a run whose actor lies so: half of each matrix, and a stage of two; what all ranks save is the same."""
    layout = {"world_size": 32, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    layout |= {"expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1, "context_parallel_size": 1}
    words = [f"actor.layout.{name}={size}" for name, size in layout.items()]
    alike, apart, there = planned(GAE), planned(GAE, f"critic.layout={json.dumps(layout)}"), planned(GAE, *words)
    for phase, terms in (("critic", ("critic", "activations")), ("values", ("critic",))):
        here, expected, usual = (plan["memory"]["phases"][phase]["terms"] for plan in (apart, there, alike))
        for term in terms:
            assert here[term] == pytest.approx(expected[term], rel=0.02) and here[term] < 0.8 * usual[term], term
        assert here["parameters"] == usual["parameters"]
    # of the stage whose passes take more, which is not the one that holds more
    here, usual = (plan["memory"]["phases"]["values"]["terms"]["log_prob"] for plan in (apart, alike))
    inside = inputs_of(GAE, *words)
    stages = [actor_bytes(inside, batch_plan(inside.config, inside.train), pp).critic.log_prob for pp in range(2)]
    assert here == pytest.approx(max(stages), rel=0.02) and here < usual
    for phase in ("values", "critic"):
        assert apart["seconds"][phase] == pytest.approx(there["seconds"][phase])
    assert apart["seconds"]["update"] == alike["seconds"]["update"]
    saved = [sum(save_bytes(inputs_of(GAE, *given))) for given in ((), (f"critic.layout={json.dumps(layout)}",))]
    assert saved[1] == pytest.approx(saved[0], rel=0.01)


def test_what_of_a_critic_leaves_the_device_is_on_the_host_and_costs_time():
    every = ("critic.param_offload=true", "critic.grad_offload=true", "critic.optimizer_offload=true")
    kept, left = planned(GAE), planned(GAE, *every)
    assert "critic" not in left["memory"]["phases"]["train"]["terms"]
    assert (
        left["memory"]["phases"]["critic"]["terms"]["critic"] == kept["memory"]["phases"]["critic"]["terms"]["critic"]
    )
    assert left["memory"]["host"]["terms"]["critic"] > 0 and "critic" not in kept["memory"]["host"]["terms"]
    assert left["seconds"]["critic"] > kept["seconds"]["critic"]


def test_a_checkpoint_takes_about_twice_the_room():
    without, with_critic = (checkpoint_bytes(MOE, "bfloat16", has_critic=each) for each in (False, True))
    assert with_critic - without == critic_count(MOE) * 14


# ---------------------------------------------------------------- checkpoints


OPTIMIZER = {"step": 3.0, "num_updates": 3, "skipped_in_a_row": 0, "lr": 1e-6, "scheduler": {"num_steps": 4}}


def saved(folder: Path, critic_updates: tuple[int, ...] = (5, 5)) -> Manifest:
    folder.mkdir()
    parts = {}
    for kind, updates in (("rank", (3, 3)), (CRITIC, critic_updates)):
        for rank, number in enumerate(updates):
            data = f"{kind} {rank}".encode()
            name = f"{kind}-{rank:05d}.safetensors"
            (folder / name).write_bytes(data)
            files = RankFiles((), {name: facts_of(data)}, OPTIMIZER | {"num_updates": number})
            parts.setdefault(kind, []).append(described(folder, rank, files, kind))
    hf = json.loads(Path("mrl/model/known/Qwen3-30B-A3B.json").read_text())
    manifest = Manifest(2, {"world_size": 2}, "bfloat16", hf, tuple(parts["rank"]), {}, {}, critic=tuple(parts[CRITIC]))
    write_manifest(folder, manifest)
    return read_manifest(folder)


def test_a_checkpoint_has_the_critic_beside_the_actor(tmp_path):
    manifest = saved(tmp_path / "step-2")
    assert (manifest.optimizer["num_updates"], manifest.of_critic.optimizer["num_updates"]) == (3, 5)
    assert sorted(manifest.files()) == [f"rank-0000{rank}.safetensors" for rank in (0, 1)]
    assert {"critic-00000.safetensors", "rank-00000.safetensors"} <= manifest.files_of_ranks().keys()


def test_a_critics_file_that_is_cut_off_is_damage_of_the_checkpoint(tmp_path):
    saved(tmp_path / "step-2")
    (tmp_path / "step-2" / "critic-00001.safetensors").write_bytes(b"")
    with pytest.raises(DamagedCheckpoint, match="critic-00001") as raised:
        read_manifest(tmp_path / "step-2")
    assert raised.value.folder == tmp_path / "step-2"


def test_ranks_that_disagree_about_the_critics_updates_save_nothing(tmp_path):
    with pytest.raises(NumericAbort, match="not saved"):
        saved(tmp_path / "step-2", (5, 6))


@pytest.mark.parametrize(
    ("recipe", "has_critic", "words"), [("ppo", False, "has no critic"), ("grpo", True, "has a critic")]
)
def test_a_run_goes_on_from_its_own_kind_alone(tmp_path, monkeypatch, recipe, has_critic, words):
    manifest = saved(tmp_path / "step-2")
    if not has_critic:
        manifest = replace(manifest, critic=())
    config = load_config(TINY, recipe, []).config
    identity = RunIdentity.of(config)
    assert identity.has_critic != has_critic
    monkeypatch.setattr("mrl.driver.resume._check_same_model", lambda *_: None)
    newest = type("Newest", (), {"manifest": manifest, "path": tmp_path / "step-2", "damaged": {}})()
    monkeypatch.setattr("mrl.driver.resume.newest_checkpoint", lambda *_: newest)
    with pytest.raises(ConfigError, match=words):
        find_resume_point(config.trainer, identity, tmp_path, resume=True)


# ---------------------------------------------------------------- verl


def test_a_ppo_script_of_verls_is_carried():
    out = import_overrides([
        "algorithm.adv_estimator=gae", "algorithm.lam=0.95", "algorithm.gamma=0.99", "trainer.critic_warmup=3",
        "critic.optim.lr=2e-5", "critic.ppo_micro_batch_size_per_gpu=4", "critic.cliprange_value=0.3",
        "critic.model.path=Qwen/Qwen3-30B-A3B", "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B",
        "critic.megatron.optimizer_offload=True", "critic.ppo_epochs=1", "critic.grad_clip=0.7",
    ])  # fmt: skip
    assert not out.of("unsupported")
    wanted = {
        "algorithm.adv_estimator": "gae", "algorithm.lam": 0.95, "algorithm.gamma": 0.99, "trainer.critic_warmup": 3,
        "critic.optim.lr": 2e-5, "critic.ppo_micro_batch_size_per_gpu": 4, "critic.cliprange_value": 0.3,
        "critic.optimizer_offload": True, "critic.optim.clip_grad": 0.7, "critic.optim.weight_decay": 0.01,
        "critic.loss_agg_mode": "token-mean",
    }  # fmt: skip
    assert {key: out.values[key] for key in wanted} == wanted and "critic.path" not in out.values


@pytest.mark.parametrize(
    ("word", "reason"),
    [("critic.model.trust_remote_code=True", "never run"), ("critic.model.lora_rank=8", "all weights")],
)
def test_what_no_critic_does_is_named_with_its_own_reason(word, reason):
    (entry,) = import_overrides(["algorithm.adv_estimator=gae", word]).of("unsupported")
    assert entry.key == word.partition("=")[0] and reason in entry.why


def test_what_a_script_says_of_a_critic_that_its_estimator_does_not_read_goes_nowhere():
    out = import_overrides(
        ["algorithm.adv_estimator=grpo", "critic.optim.lr=2e-5", "critic.ppo_epochs=3", "algorithm.lam=0.9"]
    )
    assert {entry.key for entry in out.of("not_applicable")} == {
        "critic.optim.lr",
        "critic.ppo_epochs",
        "algorithm.lam",
    }
    assert not [key for key in out.values if key.startswith(("critic", "algorithm.lam"))]


@pytest.mark.parametrize(("estimator", "asked"), [("grpo", set()), ("gae", {"critic.optim.lr"})])
def test_a_value_that_is_not_known_is_asked_for_where_a_critic_reads_it(estimator, asked):
    script = f"""python3 -m verl.trainer.main_ppo algorithm.adv_estimator={estimator} \\
        actor_rollout_ref.model.path=$HOME_OF_MODELS/m critic.model.path=$HOME_OF_MODELS/m critic.optim.lr=$RATE \\
        critic.ulysses_sequence_parallel_size=$PARTS
    """
    out = import_script(script, "x.sh", {})
    assert {entry.key for entry in out.of("unknown") if entry.key.startswith("critic")} == asked


@pytest.mark.parametrize(("steps", "kind"), [(10, "unsupported"), (1, "implied"), (0, "implied")])
def test_a_warm_up_without_a_critic_is_an_actor_that_waits(steps, kind):
    out = import_overrides(["algorithm.adv_estimator=grpo", f"trainer.critic_warmup={steps}"])
    assert "trainer.critic_warmup" in {entry.key for entry in out.of(kind)}


@pytest.mark.parametrize("word", ["critic.model.lora_rank=8", "critic.optim.optimizer=muon"])
def test_a_critic_that_is_not_here_is_named(word):
    out = import_overrides(["actor_rollout_ref.actor.strategy=megatron", word])
    assert word.partition("=")[0] in {entry.key for entry in out.of("unsupported")}


OF_VERL = ("tensor_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
    "pipeline_model_parallel_size", "override_transformer_config.num_layers_in_last_pipeline_stage")  # fmt: skip


def degrees_of_verl(**given: int) -> list[str]:
    """What a script says: the actor's degrees, and `given`, those of its critic, by the ends of their names."""
    words = ["actor_rollout_ref.actor.strategy=megatron", "trainer.nnodes=2", "trainer.n_gpus_per_node=8",
        "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B"]  # fmt: skip
    actor = {"tensor": 4, "expert_model": 8, "expert_tensor": 1}
    for where, sizes in (("actor_rollout_ref.actor", actor), ("critic", given)):
        for start, size in sizes.items():
            name = next(each for each in OF_VERL if each.startswith(start))
            words.append(f"{where}.megatron.{name}={size}")
    return words


@pytest.mark.parametrize("given", [{}, {"tensor": 4}, {"tensor": 4, "expert_model": 8, "expert_tensor": 1}])
def test_a_script_whose_critic_lies_as_its_actor_has_no_layout_of_its_own(given):
    out = import_overrides(degrees_of_verl(**given))
    assert not [key for key in out.values if key.startswith("critic.layout")] and not out.of("unsupported")
    assert len([entry for entry in out.of("implied") if entry.key.startswith("critic.megatron")]) == len(given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"tensor": 2},
            {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "expert_model_parallel_size": 1},
        ),
        (
            {"tensor": 2, "pipeline": 2, "expert_tensor": 1, "override": 23},
            {
                "expert_model_parallel_size": 1,
                "tensor_model_parallel_size": 2,
                "pipeline_model_parallel_size": 2,
                "expert_tensor_parallel_size": 1,
                "num_layers_in_last_pipeline_stage": 23,
            },
        ),
        (
            {"tensor": 4, "expert_model": 4, "expert_tensor": 1},
            {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
        ),
    ],
)
def test_a_layout_of_the_critics_own_is_carried(given, expected):
    out = import_overrides(degrees_of_verl(**given))
    start = "critic.layout."
    found = {key.removeprefix(start): value for key, value in out.values.items() if key.startswith(start)}
    assert found == expected and not out.of("unsupported")
    assert out.values["actor.layout.expert_model_parallel_size"] == 8


# ---------------------------------------------------------------- in small


def test_a_rehearsal_trains_both_in_every_step_and_is_legal(tmp_path):
    given = [
        "critic.ppo_mini_batch_size=32", "critic.optim.lr_warmup_steps=10", "trainer.critic_warmup=10",
        "critic.ppo_micro_batch_size_per_gpu=4", "critic.path=/models/critic",
    ]  # fmt: skip
    original = load_config(BASE, "ppo", given).config
    small = compose(original, WorkFolder(tmp_path), cpus=2)
    config = small.config
    assert (config.trainer.critic_warmup, config.critic.path) == (0, None)
    assert 1 <= config.of_critic.updates_per_step <= original.of_critic.updates_per_step
    model = model_spec(small_hf_config(known_hf_config("Qwen3-30B-A3B"), small.layout.layers, 320, 512))
    assert violations(ResolvedConfig(config, {}), model) == []


LAYOUTS = [
    (BASE, {DEGREES["tp"]: 4, DEGREES["pp"]: 2, DEGREES["vpp"]: 2}),
    (BASE, {"context_parallel_size": 4, "expert_model_parallel_size": 4}),
    ("parallel_configs/qwen3-30b-a3b/h200-4x8.yaml", {"pipeline_model_parallel_size": 8}),
    ("parallel_configs/qwen3-235b-a22b/h100-16x8.yaml", {"expert_model_parallel_size": 16}),
]  # fmt: skip


@pytest.mark.parametrize(("base", "degrees"), LAYOUTS)
def test_a_rehearsal_keeps_the_degrees_of_a_critics_layout_where_there_is_room(base, degrees, tmp_path):
    world = load_config(base, None, []).config.actor.layout.world_size
    given = [GAE, f"critic.layout={json.dumps({'world_size': world} | degrees)}", "critic.ppo_mini_batch_size=null"]
    original = load_config(base, None, given).config
    small = compose(original, WorkFolder(tmp_path), cpus=2)
    config = small.config
    layout = config.critic.layout
    assert layout.world_size == config.actor.layout.world_size <= 4
    lost = {entry.switch for entry in small.out_of_reach}
    kept = [name for name in degrees if f"critic.layout.{name}" not in lost]
    assert kept and all(getattr(layout, name) > 1 for name in kept)
    model = model_spec(small_hf_config(known_hf_config("Qwen3-30B-A3B"), small.layout.layers, 320, 512))
    assert violations(ResolvedConfig(config, {}), model) == []
