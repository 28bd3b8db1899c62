"""Dynamic sampling: which groups a step trains on, what happens when the prompts run out,
and rules between the settings.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from generations import AnsweringEngines, generation_of
from replicas import InMemory, scorers

from mrl.config.load import available_recipes, load_config
from mrl.config.rules import notes, violations
from mrl.data.batch import Prompt
from mrl.data.order import DataCursor, PromptStream
from mrl.data.samples import Sample
from mrl.engine.requests import Sampling
from mrl.errors import DataError, NumericAbort
from mrl.generate import judged_groups, kept_groups, rollouts
from mrl.generate.rollouts import Responder
from mrl.model import ModelSpec
from mrl.model.rotation import Rotation
from mrl.record.metrics import PhaseTimer
from mrl.record.spec import metric_spec
from mrl.reward.items import NOT_FINITE, OK, RAISED, RewardResult, RewardSpec
from mrl.reward.pool import RewardPool
from mrl.reward.resolve import resolve
from mrl.reward.worker import score_one

TINY = "parallel_configs/tiny-moe/cpu.yaml"
TINY_MODEL = ModelSpec(
    family="qwen3_moe", num_layers=4, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    vocab_size=128,
    intermediate_size=256, max_position_embeddings=128, rotation=Rotation(1e4), rms_norm_eps=1e-6,
    tie_word_embeddings=False, qkv_bias=False,
    qk_norm=True, dtype="float32", moe_layers=(0, 1, 2, 3), num_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=64,
    norm_topk_prob=True,
)  # fmt: skip
FILTER = "algorithm.filter_groups.enable=true"
BATCH, N = 2, 2  # prompts a step, responses a prompt
SIZES = (
    f"data.train_batch_size={BATCH}",
    f"rollout.n={N}",
    f"actor.ppo_mini_batch_size={BATCH}",
    "data.max_response_length=4",
)


def prompt(number: int) -> Prompt:
    return Prompt(number, (1,), "test", "x")


class World(AnsweringEngines):
    """Prompt number p is answered with the scores `scores[p]`, the oldest request first; rewards come at once."""

    def __init__(self, scores, *overrides, parts=None, lengths=(1, 1), at_a_time=BATCH):
        super().__init__()
        self.scores, self.parts, self.lengths, self.asked = scores, parts or {}, lengths, []
        self.config = load_config(TINY, overrides=[*SIZES, *overrides]).config
        self.stream = PromptStream([prompt(p) for p in range(len(scores))], at_a_time, seed=0, shuffle=False)
        self.progress_seen, self.scored, self.seeds = [], [], []
        display = SimpleNamespace(progress=lambda phase, done, total: self.progress_seen.append((done, total)))
        self.responder = Responder(self, self, self.config.reward, display, lambda: None)

    # ------------------------------------------------ engines

    def send(self, engine, requests, sampling, kept=None):
        self.asked.append([r.prompt_id for r in requests[::N]])
        self.seeds += [r.seed for r in requests]
        super().send(engine, requests, sampling)

    def take(self, timeout_s):
        later, self.under_way = self.under_way[1:], self.under_way[:1]
        arrived = super().take(timeout_s)
        self.under_way = later
        return arrived

    def respond(self, requests):
        (r,) = requests
        length = self.lengths[(r.sample_id - 1) % N]
        ids, log_probs = (5,) * length, (0.0,) * length
        return [Sample(r.prompt_id, r.group_id, r.sample_id, r.seed, r.prompt_ids, ids, log_probs, "stop", 0)]

    # ------------------------------------------------ rewards

    def for_another(self):
        return self

    def withdraw_all(self):
        self.scored = []

    def withdraw(self, sample_ids):
        self.scored = [result for result in self.scored if result.sample_id not in sample_ids]

    def submit(self, samples, questions, engine, held_s=0.0):
        for p, asked in zip(samples.rows.prompt_id.tolist(), questions, strict=True):
            score, parts = self.scores[p][asked.sample_id % N], dict(self.parts.get(p, {}))
            self.scored.append(RewardResult(asked.sample_id, score, parts, OK))

    def collect(self, at_once=True):
        scored, self.scored = self.scored, []
        return scored

    def gather(self):
        """The rollouts of the first step."""
        generation = generation_of(self.config, self.responder, self.stream)
        generation.begin()
        try:
            return generation.next_batch(PhaseTimer())
        finally:
            generation.close()


@pytest.fixture(autouse=True)
def in_memory(monkeypatch):
    for module in (rollouts, judged_groups, kept_groups):
        monkeypatch.setattr(module, "ResponseStore", InMemory)


EASY, HARD, MIXED = (1.0, 1.0), (0.0, 0.0), (1.0, 0.0)


def test_without_filtering_one_batch_is_taken_as_it_comes():
    world = World([EASY, HARD, MIXED, MIXED])
    found = world.gather()
    assert found.samples.rows.prompt_id.tolist() == [0, 0, 1, 1]
    assert world.asked == [[0, 1]] and found.cursor == DataCursor(0, 2)
    assert found.metrics["train/uniform_group_share"] == 1.0
    assert all(metric_spec(name) for name in found.metrics)


def test_groups_of_one_mind_are_replaced_until_the_batch_is_full():
    world = World([EASY, MIXED, HARD, HARD, MIXED, MIXED, MIXED, EASY], FILTER)
    found = world.gather()
    assert found.samples.rows.prompt_id.tolist() == [1, 1, 4, 4]  # 5 was generated too, and is more than a batch holds
    assert (found.samples.rows.group_id.tolist(), found.samples.rows.sample_id.tolist()) == ([0, 0, 1, 1], [0, 1, 2, 3])
    assert [(r.sample_id, r.score) for r in found.results] == [(0, 1.0), (1, 0.0), (2, 1.0), (3, 0.0)]
    assert world.asked == [[0, 1], [2, 3], [4, 5]] and found.cursor == DataCursor(0, 6)
    assert found.metrics["train/num_gen_batches"] == 3
    totals = [total for _, total in world.progress_seen]
    assert totals == sorted(totals) and set(totals) <= {4, 8, 12} and totals[-1] == 12
    assert all(done <= total for done, total in world.progress_seen)
    assert found.metrics["train/uniform_group_share"] == pytest.approx(3 / 5), "of those up to the last one trained on"
    assert found.metrics["train/trained_groups"] == 2


def test_more_prompts_may_be_generated_at_a_time_than_are_trained_on():
    world = World([EASY, MIXED, HARD, MIXED, MIXED, EASY], FILTER, "data.gen_batch_size=3", at_a_time=3)
    found = world.gather()
    assert found.samples.rows.prompt_id.tolist() == [1, 1, 3, 3]
    assert world.asked == [[0, 1, 2], [3, 4, 5]] and found.cursor == DataCursor(0, 6)


def test_further_prompts_are_drawn_while_the_first_ones_are_under_way(monkeypatch):
    """The first group teaches nothing: the next two are asked for before the second is answered."""
    world = World([EASY, MIXED, MIXED, MIXED], FILTER)
    before = []
    send = world.send
    world.send = lambda *asked: (before.append(len(world.under_way)), send(*asked))
    assert world.gather().samples.rows.prompt_id.tolist() == [1, 1, 2, 2]
    assert before[0] == 0 < before[1]


ENDLESS = [EASY, MIXED, HARD, EASY, HARD, EASY]
TWO = "algorithm.filter_groups.max_num_gen_batches=2"
END = "algorithm.filter_groups.on_exhausted="


def test_at_the_limit_a_run_stops_with_what_to_do():
    world = World(ENDLESS, FILTER, TWO, END + "error")
    with pytest.raises(
        DataError,
        match=r"step 1: after 2 batches of prompts, 1 of the 2 groups.*differ in score.*partial or unfiltered",
    ):
        world.gather()
    assert len(world.asked) == 2


def test_at_the_limit_a_step_may_train_on_what_there_is():
    found = World(ENDLESS, FILTER, TWO, END + "partial").gather()
    assert found.samples.rows.prompt_id.tolist() == [1, 1]
    assert found.metrics["train/trained_groups"] == 1
    with pytest.raises(DataError, match=r"0 of the 2 groups.*set on_exhausted to unfiltered"):
        World([EASY, HARD] * 2, FILTER, TWO, END + "partial").gather()


def test_at_the_limit_a_batch_may_be_filled_with_the_first_of_the_others():
    found = World(ENDLESS, FILTER, TWO, END + "unfiltered").gather()
    assert found.samples.rows.prompt_id.tolist() == [1, 1, 0, 0]
    assert found.samples.rows.group_id.tolist() == [0, 0, 1, 1]


def test_a_prompt_drawn_twice_in_a_step_is_not_answered_with_the_same_seeds(monkeypatch):
    """Two prompts and two a batch: the next batch is of the next epoch."""
    scores = [EASY, MIXED]
    world = World(scores, FILTER)
    world.gather()
    assert [sorted(drawn) for drawn in world.asked] == [[0, 1], [0, 1]] and len(set(world.seeds)) == 4 * N


class Engines(AnsweringEngines):
    """Of each four responses the third has a log-prob that is no number."""

    def __init__(self, bad: float):
        super().__init__()
        self.log_probs = [(-0.5, -0.25), (-0.5, -0.25), (-0.5, bad), (-0.5, -0.25)]

    def respond(self, requests):
        given = [self.log_probs[r.sample_id % 4] for r in requests]
        return [
            Sample(3, 0, r.sample_id, 0, (1,), (97, 98), log_probs, "stop", 7)
            for r, log_probs in zip(requests, given, strict=True)
        ]


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_response_from_no_distribution_is_left_out_and_too_many_end_the_run_with_exit_6(bad):
    """What a sync that was forgotten after a sleep would give, were it not for the fence: see test_engine_sleep."""
    display = SimpleNamespace(progress=lambda *_: None)
    letters = SimpleNamespace(decode=lambda ids, **_: "".join(map(chr, ids)))

    def results(share: float) -> list[RewardResult]:
        reward = load_config(TINY, None, [f"reward.max_failure_share={share}"]).config.reward
        with RewardPool(RewardSpec("exact_match"), 1) as pool:
            rewards = scorers(pool, letters)
            responder = Responder(Engines(bad), rewards, reward, display, lambda: None)
            samples = responder.respond([prompt(3)], 4, Sampling(1.0, 4, ()), lambda prompt, k: k, "validation")
            return responder.collect_rewards(samples)

    assert [result.reason for result in results(0.25)] == [OK, OK, NOT_FINITE, OK]
    with pytest.raises(NumericAbort, match=r"of prompt 3 under weight version 7") as stopped:
        results(0.2)
    assert stopped.value.exit_code == 6


def test_the_metric_may_be_the_reward_after_penalties_or_a_part_of_it(monkeypatch):
    """Scores alike and lengths 1 and 4 of 4: only the penalised rewards differ.

    Parts alike and scores not: acc says uniform.
    """
    penalty = ("algorithm.overlong_buffer={enable: true, len: 2}", FILTER, TWO, END + "partial")
    by_reward = World([EASY] * 4, *penalty, "algorithm.filter_groups.metric=reward", lengths=(1, 4)).gather()
    assert by_reward.metrics["train/uniform_group_share"] == 0
    np.testing.assert_allclose(by_reward.rewards, [1, 0, 1, 0])
    acc = {p: {"acc": True} for p in range(4)}
    with pytest.raises(DataError, match="differ in acc"):
        World([MIXED] * 4, FILTER, TWO, END + "partial", "algorithm.filter_groups.metric=acc", parts=acc).gather()


def test_a_users_function_that_gives_a_number_alone_can_be_filtered_by_acc(tmp_path):
    """verl's usual setting for DAPO. acc is what the function gave, before the overlong penalty."""
    (tmp_path / "mine.py").write_text("def compute_score(data_source, solution_str, **_): return float(solution_str)")
    function = resolve(RewardSpec(path=str(tmp_path / "mine.py")))
    scored = [score_one(function, "", text, None, {}) for text in ("0.5", "0.5", "-1")]
    results = [RewardResult(i, score, parts, reason) for i, (reason, score, parts, _) in enumerate(scored)]
    np.testing.assert_array_equal(rollouts.metric_values("acc", results, np.array([0.5, -0.5, -1.0])), [0.5, 0.5, -1.0])


def test_a_metric_that_the_reward_does_not_give_is_told_with_those_it_does():
    world = World([MIXED] * 4, FILTER, "algorithm.filter_groups.metric=acc", parts={0: {"format": 1.0, "pred": "7"}})
    with pytest.raises(DataError, match=r"no number under 'acc'.*allowed: score, reward, format, pred"):
        world.gather()


def test_a_failed_reward_has_its_score_under_every_name():
    results = [RewardResult(0, -1.0, {}, RAISED), RewardResult(1, 0.5, {"acc": 1}, OK)]
    np.testing.assert_array_equal(rollouts.metric_values("acc", results, np.zeros(2)), [-1.0, 1.0])


def test_the_part_called_reward_is_what_is_left_after_penalties():
    """So gdpo, which reads parts alone, sees the overlong penalty where it names `reward`."""
    results, rewards = [RewardResult(0, 1.0, {"acc": 1}, OK)], np.array([0.25])
    found = {name: rollouts.metric_values(name, results, rewards).tolist() for name in ("score", "reward", "acc")}
    assert found == {"score": [1.0], "reward": [0.25], "acc": [1.0]}


# --- rules ------------------------------------------------------------------------------------------------------------


def broken(*overrides, recipe=None):
    return {v.field: v for v in violations(load_config(TINY, recipe, overrides), TINY_MODEL)}


CORRECTION = "algorithm.rollout_correction"
CONTRADICTIONS = [
    (["algorithm.use_kl_in_reward=true", "algorithm.use_kl_loss=true"], "algorithm.use_kl_in_reward", "count twice"),
    ([f"{CORRECTION}.level=token", "algorithm.anchor=rollout"], f"{CORRECTION}.level", "count the same gap twice"),
    ([f"{CORRECTION}={{level: token, mode: truncate, low: 0.5}}"], f"{CORRECTION}.low", "above only"),
    ([f"{CORRECTION}={{level: token, mode: mask, low: 3, high: 2}}"], f"{CORRECTION}.low", "between the two"),
    ([f"{CORRECTION}={{level: sequence, mode: mask, high: 0.5}}"], f"{CORRECTION}.high", "the ratio is 1"),
    ([f"{CORRECTION}.level=tokens"], f"{CORRECTION}.level", ""),
    ([f"{CORRECTION}={{level: token, mode: truncated}}"], f"{CORRECTION}.mode", ""),
    (["algorithm.anchor=recomputed"], "algorithm.anchor", ""),
    (["algorithm.adv_estimator=gdpo"], "algorithm.gdpo_reward_keys", "name the parts"),
    (
        ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a, b]", "algorithm.gdpo_reward_weights=[1]"],
        "algorithm.gdpo_reward_weights",
        "",
    ),
    (
        ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[acc]", "algorithm.use_kl_in_reward=true"],
        "algorithm.use_kl_in_reward",
        "the KL is in none of them",
    ),
    (
        ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[acc]", "algorithm.overlong_buffer.enable=true"],
        "algorithm.gdpo_reward_keys",
        "the penalty is in none but reward",
    ),
    # of verl 0.9.1, compute_gdpo_outcome_advantage: a part that is named twice counts twice
    (
        ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a, a]"],
        "algorithm.gdpo_reward_keys",
        "counts once",
    ),
    (
        ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a, b]", "algorithm.gdpo_reward_weights=[0, 0]"],
        "algorithm.gdpo_reward_weights",
        "nothing would be learned",
    ),
    (["algorithm.gdpo_reward_keys=[acc]"], "algorithm.gdpo_reward_keys", "read the score alone"),
    (["algorithm.gdpo_reward_weights=[2]"], "algorithm.gdpo_reward_weights", "read the score alone"),
    (["data.gen_batch_size=128"], "data.gen_batch_size", "trains on all that it generates"),
    ([FILTER, END + "partial"], "algorithm.filter_groups.max_num_gen_batches", "never used up"),
    (["rollout.n=1", "algorithm.adv_estimator=reinforce_plus_plus", FILTER], "rollout.n", "one response does not"),
    (
        ["algorithm.overlong_buffer={enable: true, len: 5}"],
        "algorithm.overlong_buffer.len",
        "before the longest response",
    ),
]


@pytest.mark.parametrize(("overrides", "field", "why"), CONTRADICTIONS)
def test_settings_that_contradict_each_other_are_refused_by_their_key(overrides, field, why):
    (violation,) = broken(*overrides).values()
    assert violation.field == field and why in violation.why and violation.rule


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("algorithm.adv_estimator=reinforce++", "it is called reinforce_plus_plus here"),
        ("algorithm.adv_estimator=rlo", "did you mean rloo?"),
        ("algorithm.anchor=rolout", "did you mean rollout?"),
        (f"{CORRECTION}.level=geometrical", "did you mean geometric?"),
        ("algorithm.kl_penalty=low_var_k", "did you mean low_var_kl?"),
    ],
)
def test_unknown_names_get_the_closest(given, told):
    (violation,) = broken(given).values()
    assert told in violation.rule


def test_losses_measured_from_generation_want_its_anchor():
    dppo = ["algorithm.policy_loss.loss_mode=dppo_tv", "algorithm.policy_loss.loss_agg_mode=token-mean"]
    assert broken(*dppo, recipe="grpo")["algorithm.anchor"].allowed == ("rollout",)
    assert broken(*dppo, "algorithm.anchor=rollout", recipe="grpo") == {}
    assert broken(*dppo, "algorithm.policy_loss.force=true", recipe="grpo") == {}


def test_gdpo_with_the_reward_among_its_parts_takes_a_penalty():
    parts = [
        "algorithm.adv_estimator=gdpo",
        "algorithm.gdpo_reward_keys=[acc, reward]",
        "algorithm.overlong_buffer.enable=true",
    ]
    assert broken(*parts) == {}


@pytest.mark.parametrize("loss_mode", ["vanilla", "cispo", "geo_mean", "clip_cov", "dppo_tv"])
def test_a_clip_of_sequences_is_refused_for_losses_that_clip_tokens(loss_mode):
    """Changing gspo's loss_mode alone leaves its band of 4e-4, which clips nearly every token."""
    loss = "algorithm.policy_loss."
    settings = [
        f"{loss}loss_mode={loss_mode}",
        "algorithm.anchor=" + ("rollout" if loss_mode == "dppo_tv" else "recompute"),
    ]
    found = broken(*settings, f"{loss}clip_ratio_high=4e-4", recipe="gspo")
    assert set(found) == {loss + "clip_ratio_high"} and "single tokens" in found[loss + "clip_ratio_high"].rule
    assert broken(*settings, f"{loss}clip_ratio_high=0.2", recipe="gspo") == {}
    assert broken(*settings, f"{loss}clip_ratio_high=4e-4", f"{loss}force=true", recipe="gspo") == {}


def test_covariance_bounds_must_leave_room():
    loss = "algorithm.policy_loss."
    found = broken(loss + "loss_mode=clip_cov", loss + "clip_cov_lb=5", recipe="grpo")
    assert set(found) == {loss + "clip_cov_lb"}


def test_an_update_that_cannot_clip_is_noted():
    resolved = load_config(TINY, overrides=["actor.ppo_mini_batch_size=64"])
    assert any("every ratio is exactly 1" in note for note in notes(resolved, TINY_MODEL))
    anchored = load_config(TINY, overrides=["actor.ppo_mini_batch_size=64", "algorithm.anchor=rollout"])
    assert not any("every ratio is exactly 1" in note for note in notes(anchored, TINY_MODEL))


def test_epochs_under_dynamic_sampling_are_noted():
    for steps, said in (("null", True), ("5", False)):
        resolved = load_config(TINY, "dapo", [f"trainer.total_training_steps={steps}"])
        assert any("passes over the data more often" in note for note in notes(resolved, TINY_MODEL)) == said


NEEDED = {"distillation": ("distillation.teacher_model.model_path=Qwen/Qwen3-30B-A3B",)}  # a teacher has to be named


@pytest.mark.parametrize("recipe", available_recipes())
def test_every_recipe_goes_with_the_tiny_preset_by_name_alone(recipe):
    assert broken(*NEEDED.get(recipe, ()), recipe=recipe) == {}


def test_a_recipe_leaves_nothing_of_another_behind():
    """Every recipe sets the same switches, so that changing the name changes the whole algorithm."""
    dapo = load_config(TINY, "dapo").config.algorithm
    # a fifth of 4, at least one
    assert dapo.filter_groups.enable and dapo.overlong_buffer.enable and dapo.overlong_buffer.len == 1
    for recipe in {*available_recipes()} - {"dapo"}:
        left = load_config(TINY, recipe, ["data.max_response_length=4"]).config.algorithm
        assert not left.filter_groups.enable and not left.overlong_buffer.enable and not left.overlong_filter
