"""Several epochs over a step's samples, in order or in drawn mini-batches (PPO, arXiv:1707.06347, algorithm 1)."""

from itertools import chain

import numpy as np
import pytest
from replicas import Replicas, scored_step, stored, trained_of
from test_critic import broken, inputs_of
from test_step_batch import PROMPTS, SIZES, TINY, N, rollouts_of, samples

from mrl.algo.plain import Denominators
from mrl.config.describe import describe_batch
from mrl.config.load import load_config
from mrl.config.loss_rules import loss_notes
from mrl.data.order import permutation
from mrl.driver.step_batch import StepBatch, load_metrics
from mrl.plan.plan_inputs import batch_plan, engine_of
from mrl.plan.times import phase_seconds, step_flops
from mrl.rank.cut import mini_batch_rows
from mrl.tools.import_verl.translate import import_overrides

ROWS = PROMPTS * N
MINI = 2 * N


def config_of(*overrides: str):
    return load_config(TINY, None, [*SIZES, *overrides]).config


def step_of(replicas: int, *overrides: str, number: int = 1) -> StepBatch:
    return StepBatch(Replicas(config_of(*overrides), replicas), stored(samples()), number)


def trained(step: StepBatch, update: int) -> np.ndarray:
    """The rows that all replicas train on in an update, each as often as it is there."""
    shares = step.cut.mini_batches[update]
    rows = [micro.rows for share in shares for micro in share if not micro.is_filler]
    return np.sort(np.concatenate(rows))


@pytest.mark.parametrize("shuffle", ["true", "false"])
@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_each_epoch_trains_on_every_row_once_where_it_lies_and_no_mini_batch_depends_on_the_layout(replicas, shuffle):
    asked = ("actor.ppo_epochs=3", f"actor.shuffle={shuffle}")
    step, one = (step_of(data, *asked) for data in (replicas, 1))
    assert len(step.cut.mini_batches) == 3 * PROMPTS // 2 == step._actor.config.updates_per_step
    for update, rows in enumerate(step.cut.rows):
        assert trained(step, update).tolist() == rows.tolist() == one.cut.rows[update].tolist() and len(rows) == MINI
    per_epoch = PROMPTS // 2
    own = [step.cut.own_rows(replica).tolist() for replica in range(replicas)]
    assert sorted(chain.from_iterable(own)) == list(range(ROWS))
    for epoch in range(3):
        epochs = step.cut.mini_batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        for replica in range(replicas):
            held = [m.rows for part in epochs for m in part[replica] if not m.is_filler]
            assert sorted(np.concatenate(held).tolist()) == own[replica]
    assert all(len({len(share) for share in part}) == 1 for part in step.cut.mini_batches)  # ranks keep in step


def test_drawn_mini_batches_are_others_in_each_epoch_and_step_and_the_same_again():
    drawn = [step_of(2, "actor.ppo_epochs=3", number=number).cut.rows for number in (7, 7, 8)]
    as_lists = [[rows.tolist() for rows in each] for each in drawn]
    assert as_lists[0] == as_lists[1] != as_lists[2]
    epochs = [as_lists[0][3 * k : 3 * k + 3] for k in range(3)]
    assert all(sorted(chain.from_iterable(epoch)) == list(range(ROWS)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert step_of(2, "actor.ppo_epochs=3", "trainer.seed=5", number=7).cut.rows[0].tolist() != as_lists[0][0]
    one = step_of(2, "actor.shuffle=true").cut.rows
    assert len(one) == 3 and one[0].tolist() != list(range(MINI))


def test_epochs_in_order_repeat_the_micro_batches_of_the_first():
    """So R2 finds the routes that old log-probs recorded."""
    cut = step_of(3, "actor.ppo_epochs=2", "actor.shuffle=false").cut
    as_rows = [[[m.rows.tolist() for m in share] for share in part] for part in cut.mini_batches]
    assert as_rows[:3] == as_rows[3:] and [rows.tolist() for rows in cut.rows[:2]] == [
        list(range(MINI)),
        list(range(MINI, 2 * MINI)),
    ]
    joined = [list(chain.from_iterable(part[replica] for part in as_rows[:3])) for replica in range(3)]
    assert [[m.rows.tolist() for m in share] for share in cut.log_probs] == joined


def test_no_epoch_has_the_order_of_the_data_or_of_another_step():
    """A key of numpy's SeedSequence is as if zeros followed it."""
    actor = config_of("actor.ppo_epochs=3", "actor.ppo_mini_batch_size=1").actor
    drawn = [[rows.tolist() for rows in mini_batch_rows(actor, 1, 64, (5, step))] for step in range(3)]
    orders = [list(chain.from_iterable(found[at : at + 64])) for found in drawn for at in (0, 64, 128)]
    of_data = [permutation(key, 64).tolist() for key in [(5, n) for n in range(3)] + [(5, 0, n, 1) for n in range(3)]]
    assert len({tuple(order) for order in orders + of_data}) == 9 + 6


@pytest.mark.parametrize("overrides", [(), ("algorithm.overlong_filter=true",)])
def test_denominators_of_each_update_count_its_own_rows_and_old_log_probs_are_computed_once(overrides):
    told = []
    config = config_of("actor.ppo_epochs=2", *overrides)
    actor = Replicas(
        config, 2, updated=lambda counts, number: told.append(counts) or [{"actor/skipped_updates": (0.0, 1.0)}]
    )
    passes = []
    for each in actor.actors:
        whole = each.policy_log_probs
        each.policy_log_probs = lambda *given, whole=whole: passes.append(1) or whole(*given)
    step, _ = scored_step(actor, rollouts_of(stored(samples())))
    lengths = trained_of(actor)
    seen = []
    step.update(lambda norms, sample_ids: seen.extend(sample_ids))
    assert len(passes) == 2  # once a replica
    for counts in told:
        assert counts == [Denominators.counted(lengths[rows]) for rows in step.cut.rows]
    assert [len(ids) for ids in seen] == [MINI] * 6


def test_a_replicas_tokens_are_counted_once_however_many_epochs_train_on_them():
    lengths = np.full(ROWS, 3)
    for epochs in (1, 2, 4):
        loads = step_of(2, f"actor.ppo_epochs={epochs}").cut.loads
        whole = step_of(2, "actor.ppo_epochs=1", "actor.shuffle=true" if epochs > 1 else "actor.shuffle=false").cut
        found = load_metrics(lengths, loads, epochs)
        expected = load_metrics(lengths, whole.loads)
        names = ("global_seqlen/balanced_min", "global_seqlen/balanced_max")
        assert [found[name] for name in names] == [expected[name] for name in names]


@pytest.mark.parametrize(
    ("own", "epochs", "is_same"),
    [((), 2, True), (("critic.ppo_epochs=3",), 3, False), (("critic.shuffle=false",), 2, False)],
)
def test_a_critic_has_the_actors_epochs_and_order_or_its_own(own, epochs, is_same):
    sizes = [*SIZES, "algorithm.adv_estimator=gae", "actor.ppo_epochs=2", *own]
    step = StepBatch(Replicas(load_config(TINY, None, sizes).config, 3), stored(samples()), 4)
    per_epoch = PROMPTS // 2
    assert len(step.critic_cut.rows) == epochs * per_epoch
    rows, others = ([each.tolist() for each in cut.rows] for cut in (step.critic_cut, step.cut))
    assert (rows == others) == is_same
    for epoch in range(epochs):
        part = rows[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(chain.from_iterable(part)) == list(range(ROWS))


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        (["algorithm.anchor=on_policy"], ["actor.ppo_epochs"]),
        (["actor.router_replay=R2"], ["actor.shuffle"]),
        (["actor.router_replay=R2", "actor.shuffle=false"], []),
        (["actor.router_replay=R3"], []),
        (["algorithm.policy_loss.loss_mode=kl_cov"], ["actor.shuffle"]),
        (["algorithm.policy_loss.loss_mode=kl_cov", "actor.shuffle=false"], []),
        ([], []),
    ],
)
def test_what_several_epochs_do_not_go_with_is_one_message(overrides, fields):
    batch = ["data.train_batch_size=64", "actor.ppo_mini_batch_size=64", "actor.ppo_epochs=2"]
    assert [violation.field for violation in broken(*batch, *overrides, recipe=None)] == fields


def test_uneven_draws_are_told_before_a_run():
    def told(world: int, *overrides: str) -> bool:
        layout = [f"actor.layout.{name}_parallel_size=1" for name in ("tensor_model", "pipeline_model", "expert_model")]
        config = config_of("actor.ppo_epochs=2", f"actor.layout.world_size={world}", *layout, *overrides)
        return any("are drawn unevenly" in note for note in loss_notes(config))

    assert told(2) and not told(1) and not told(2, "actor.shuffle=false") and not told(2, "rollout.n=32")


def test_a_plan_and_a_schedule_count_the_updates_of_all_epochs():
    alone = "actor.override_ddp_config={overlap_param_gather: false}"  # a last update has no next forward beside it
    plain, twice = (inputs_of(f"actor.ppo_epochs={epochs}", alone) for epochs in (1, 2))
    batches = [batch_plan(inputs.config, inputs.train) for inputs in (plain, twice)]
    seconds = [phase_seconds(i, b, engine_of(i)) for i, b in zip((plain, twice), batches, strict=True)]
    flops = [step_flops(i, b) for i, b in zip((plain, twice), batches, strict=True)]
    for of_phase in (seconds, flops):
        others = [{name: value for name, value in each.items() if name != "update"} for each in of_phase]
        assert others[0] == others[1] and of_phase[1]["update"] == pytest.approx(2 * of_phase[0]["update"], rel=1e-12)
    assert [b.to_json()["updates_per_step"] for b in batches] == [4, 8] and batches[0].micro == batches[1].micro
    config = config_of("actor.ppo_epochs=2", "trainer.total_training_steps=10")
    assert config.total_updates == 10 * 2 * PROMPTS // 2
    assert "6 updates of 8 samples in 2 epochs" in describe_batch(config)


def test_a_verl_script_keeps_its_epochs_and_their_order():
    """verl repeats one order in every epoch unless `shuffle` is set, and counts a warm-up in steps."""
    actor = "actor_rollout_ref.actor."
    words = ["data.train_batch_size=64", actor + "ppo_mini_batch_size=16", actor + "ppo_epochs=3"]
    warmup = actor + "optim.lr_warmup_steps=5"
    values = import_overrides([*words, warmup, "algorithm.adv_estimator=grpo"]).values
    assert (values["actor.ppo_epochs"], values["actor.shuffle"]) == (3, False)
    assert values["actor.optim.lr_warmup_steps"] == 5 * 4 * 3
    assert import_overrides([*words, actor + "shuffle=True"]).values["actor.shuffle"] is True
    one = import_overrides([*words[:2], "algorithm.adv_estimator=grpo"]).values
    assert not {"actor.ppo_epochs", "actor.shuffle"} & one.keys()
    critic = import_overrides([*words[:2], "algorithm.adv_estimator=gae", "critic.ppo_epochs=2"])
    assert critic.values["critic.ppo_epochs"] == 2 and critic.values["actor.shuffle"] is False
    assert not critic.of("unsupported")
