"""A step on replicas: rows lie where lengths put them, and nothing that is computed depends on it."""

import ast
import math
import pickle
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from replicas import InMemory, Replicas, scored_step, stored, trained_of
from whole_batch import whole_batch

from mrl.algo.advantages import tried_advantage
from mrl.algo.correction import mismatch_of_rows
from mrl.algo.plain import Denominators
from mrl.algo.rows import in_chunks
from mrl.algo.selection import _lots
from mrl.algo.spec import ADVANTAGES
from mrl.cluster import actor_group
from mrl.config.load import load_config
from mrl.data.order import DataCursor
from mrl.data.samples import Sample, SampleRows, packed
from mrl.driver.reporting import record_shown_rows
from mrl.driver.sample_writer import SampleWriter, _Writer
from mrl.driver.step_batch import StepBatch
from mrl.errors import DataError, Interrupted, NumericAbort
from mrl.generate.rollouts import Rollouts, compared
from mrl.model.layout import TrainLayout
from mrl.rank import cut
from mrl.rank.rank_batch import RankBatch
from mrl.rank.rank_step import RankStep
from mrl.rank.rank_worker import MODEL_VERBS, ActorWorker
from mrl.record.run_dir import RunDir
from mrl.record.sample_files import StepFile, read_samples
from mrl.record.shown_rows import read_shown_rows
from mrl.reward.items import LEFT_OUT, OK, RewardResult
from mrl.store.response_store import BLOCK_BYTES, ResponseBlock, ResponseStore

TINY = "parallel_configs/tiny-moe/cpu.yaml"
PROMPTS, N = 6, 4
SIZES = (
    f"data.train_batch_size={PROMPTS}",
    f"rollout.n={N}",
    "actor.ppo_mini_batch_size=2",
    "data.max_response_length=64",
)


def samples(seed=0) -> list[Sample]:
    rng, found = np.random.default_rng(seed), []
    for i in range(PROMPTS * N):
        prompt, response = (tuple(rng.integers(1, 120, n).tolist()) for n in (rng.integers(1, 9), rng.integers(1, 60)))
        log_probs = tuple((-3 * rng.random(len(response))).tolist())
        end, later = ("stop", "length")[i % 5 == 0], ((len(response) // 2, 2),) if i % 3 and len(response) > 1 else ()
        found.append(Sample(i // N, i // N, i, i, prompt, response, log_probs, end, 1, later_versions=later))
    return found


def rollouts_of(samples: ResponseStore) -> Rollouts:
    scores = np.random.default_rng(1).integers(0, 3, len(samples)).astype(float)
    results = [RewardResult(i, s, {"acc": s, "form": float(i % 2)}, OK) for i, s in enumerate(scores.tolist())]
    return Rollouts(samples, results, scores, DataCursor(), {})


def noise(log_probs: np.ndarray, frequency: int) -> np.ndarray:
    return np.sin(log_probs * frequency).astype(np.float32) * np.float32(0.3)


class Noisy(Replicas):
    """Log-probs that differ from generation's by something of each token's own."""

    def __init__(self, config, data, updated=None):
        super().__init__(config, data, lambda own: noise(own, 1000), lambda own: noise(own, 2000), updated)


def done(replicas: int, *overrides) -> tuple[dict, dict]:
    """Metrics, and columns of all tokens in the order of the step, after everything up to the update."""
    config = load_config(TINY, None, [*SIZES, *overrides]).config
    actor, rollouts = Noisy(config, replicas), rollouts_of(stored(samples()))
    step, scored = scored_step(actor, rollouts)
    held = [step.cut.needed_rows(replica) for replica in range(replicas)]
    names = ("old_log_probs", "advantages", "keep", "loss_weights", "ref_log_probs", "selected")
    columns = {name: actor.of_tokens(name, held) for name in names if getattr(actor.batches[0].batch, name) is not None}
    counts = [Denominators.counted(trained_of(actor)[rows]) for rows in step.cut.rows]
    return {**scored.metrics, **{f"count {i}": (c.tokens, c.sequences) for i, c in enumerate(counts)}}, columns


KL = ("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.1")
CORRECTION = "algorithm.rollout_correction="
CASES = [
    *([f"algorithm.adv_estimator={name}", *KL] for name in ADVANTAGES if name not in ("gdpo", "gae", "maxrl")),
    ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[acc, form]"],
    *(
        [CORRECTION + f"{{level: {level}, mode: mask, low: 0.7, high: 1.2}}",
            "algorithm.adv_estimator=reinforce_plus_plus", *KL]
        for level in ("token", "sequence", "geometric")
    ),
    ["algorithm.overlong_filter=true", CORRECTION + "{level: token, mode: truncate, high: 1.1}"],
    ["algorithm.anchor=rollout"],
    *([f"algorithm.policy_loss.loss_mode={mode}", "algorithm.policy_loss.clip_cov_lb=0.01",
            f"algorithm.policy_loss.{mode}_ratio=0.05"]
      for mode in ("clip_cov", "kl_cov")),
]  # fmt: skip


@pytest.mark.parametrize("overrides", CASES, ids=lambda case: case[0].rpartition(".")[2])
def test_tokens_have_the_same_bits_and_metrics_agree_wherever_rows_lie(overrides):
    one, columns = done(1, *overrides)
    for replicas in (2, 3, 5):
        other, parts = done(replicas, *overrides)
        assert parts.keys() == columns.keys()
        for name, values in columns.items():
            np.testing.assert_array_equal(parts[name], values, err_msg=name)
        assert other == one  # sums are rounded once, so not a bit


@pytest.mark.parametrize("overrides", CASES, ids=lambda case: case[0].rpartition(".")[2])
def test_replicas_come_to_what_one_process_with_all_tokens_does(overrides):
    config = load_config(TINY, None, [*SIZES, *overrides]).config
    rollouts = rollouts_of(stored(samples()))
    own = rollouts.samples.read().rollout_log_probs
    metrics, columns = whole_batch(config, rollouts, own + noise(own, 1000), own + noise(own, 2000), _lots)
    found, parts = done(3, *overrides)
    assert parts.keys() == columns.keys()
    for name, values in columns.items():
        np.testing.assert_array_equal(parts[name], values, err_msg=name)
    assert found.keys() == metrics.keys() | {"actor/entropy"}
    for name, value in metrics.items():
        assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-15), name


def with_one_judged(rollouts: Rollouts) -> Rollouts:
    """The environments of group 0 failed but for its second response, and one of group 1 did."""
    results = [replace(each, reason=LEFT_OUT) if number in (0, 2, 3, 5) else each
               for number, each in enumerate(rollouts.results)]  # fmt: skip
    return replace(rollouts, results=results)


@pytest.mark.parametrize("replicas", [1, 3])
def test_reinforce_plus_plus_trains_on_the_only_judged_response_of_a_group(replicas):
    """verl's formula in float64, token by token: rewards to come without a discount, whitened over all that count."""
    config = load_config(TINY, None, [*SIZES, "algorithm.adv_estimator=reinforce_plus_plus", *KL]).config
    actor, rollouts = Noisy(config, replicas), with_one_judged(rollouts_of(stored(samples())))
    step, _ = scored_step(actor, rollouts)
    counted = compared(step.rows.group_id, rollouts.results, config.algorithm.needs_group)
    assert np.flatnonzero(~counted).tolist() == [0, 2, 3, 5]
    made = rollouts.samples.read()
    own = made.rollout_log_probs.astype(np.float64)
    to_reference = noise(made.rollout_log_probs, 1000) - noise(made.rollout_log_probs, 2000).astype(np.float64)
    returns = np.zeros(len(own))
    ends = np.cumsum(made.response_lengths)
    for row, (end, length) in enumerate(zip(ends, made.response_lengths, strict=True)):
        to_come = rollouts.rewards[row]
        for token in range(end - 1, end - length - 1, -1):
            to_come -= 0.1 * to_reference[token]
            returns[token] = to_come
    mask = np.repeat(counted, made.response_lengths)
    mean = returns[mask].sum() / mask.sum()
    variance = ((returns[mask] - mean) ** 2).sum() / (mask.sum() - 1)
    expected = np.where(mask, (returns - mean) / np.sqrt(variance + 1e-8), 0.0)
    held = [step.cut.needed_rows(replica) for replica in range(replicas)]
    np.testing.assert_allclose(actor.of_tokens("advantages", held), expected, rtol=1e-5, atol=1e-6)
    assert trained_of(actor)[1] == made.response_lengths[1] > 0


@pytest.mark.parametrize("estimator", [*ADVANTAGES, "ones-own"])
def test_the_only_judged_response_of_a_group_counts_where_an_advantage_compares_none(estimator):
    own = "algorithm.custom_advantage.path=own.py"
    config = load_config(TINY, None, [f"algorithm.adv_estimator={estimator}", own]).config
    results = with_one_judged(rollouts_of(stored(samples()))).results
    counted = compared(np.arange(len(results)) // N, results, config.algorithm.needs_group)
    assert counted[1] == (estimator in ("reinforce_plus_plus", "gae", "turn_return"))
    assert counted[4:8].tolist() == [True, False, True, True] and counted[8:].all()


def test_rows_computed_in_chunks_have_the_same_bits():
    lengths = np.array([3, 0, 40, 1, 7, 0, 12])
    old = -np.random.default_rng(0).random(int(lengths.sum()))
    whole = mismatch_of_rows(old - 0.1, old, lengths)
    for tokens in (1, 5, 40, 1000):
        parts = in_chunks(mismatch_of_rows, (old - 0.1, old), lengths, tokens)
        assert all(np.array_equal(parts[name], values) for name, values in whole.items())
    assert in_chunks(mismatch_of_rows, (old[:0], old[:0]), lengths[:0])["kl"].shape == (0,)


def test_every_row_is_trained_on_one_replica_and_a_replica_needs_hardly_more():
    step = StepBatch(Replicas(load_config(TINY, None, SIZES).config, 5), stored(samples()), 1)
    own = [step.cut.own_rows(replica) for replica in range(5)]
    assert sorted(np.concatenate(own)) == list(range(PROMPTS * N))
    for replica in range(5):
        fillers = set(step.cut.needed_rows(replica)) - set(own[replica])
        assert len(fillers) <= 3  # the shortest row of a mini-batch, where it has fewer rows than there are replicas


def test_the_old_policys_rows_are_cut_where_they_are_under_a_limit_of_their_own():
    limits = (
        "actor.use_dynamic_bsz=true",
        "actor.ppo_max_token_len_per_gpu=80",
        "actor.log_prob_max_token_len_per_gpu=200",
    )
    step = StepBatch(Replicas(load_config(TINY, None, [*SIZES, *limits]).config, 3), stored(samples()), 1)
    for replica in range(3):
        micros = [micro.rows for micro in step.cut.log_probs[replica] if not micro.is_filler]
        assert sorted(np.concatenate(micros)) == step.cut.own_rows(replica).tolist()
        assert all(step.rows.lengths[rows].sum() <= 200 for rows in micros)
    assert len({len(part) for part in step.cut.log_probs}) == 1 and len(step.cut.log_probs[0]) < sum(
        len(m[0]) for m in step.cut.mini_batches
    )


class Staged(Noisy):
    """Each replica is two stages of two ranks. The first stage has no log-probs, and one rank of the last answers."""

    def __init__(self, config, data):
        super().__init__(config, 4 * data, lambda counts, number: [{}])
        layout = {"world_size": 4 * data, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
        self.layout = TrainLayout.build(layout, self.model)
        for rank, actor in enumerate(self.actors):
            place = self.layout.dense_coords(rank)
            actor.on_last_stage = place.pp == 1
            actor.holds_result = place.pp == 1 and place.tp == 0
            if place.pp == 0:
                actor.policy_log_probs = actor.reference_log_probs = lambda *_: None


@pytest.mark.parametrize("overrides", CASES, ids=lambda case: case[0].rpartition(".")[2])
def test_every_rank_of_a_last_stage_has_what_its_loss_needs_and_all_ranks_count_alike(overrides):
    config = load_config(TINY, None, [*SIZES, *overrides]).config
    one, actor = Noisy(config, 2, lambda counts, number: [{"actor/skipped_updates": (0.0, 1.0)}]), Staged(config, 2)
    (step, expected), (_, found) = (scored_step(each, rollouts_of(stored(samples()))) for each in (one, actor))
    assert found.metrics == expected.metrics
    np.testing.assert_array_equal(trained_of(actor), trained_of(one))
    for rank, tokens in enumerate(actor.batches):
        place = actor.layout.dense_coords(rank)
        if place.pp == 1:
            for name, values in one.batches[place.dp].batch.arrays.items():
                np.testing.assert_array_equal(getattr(tokens.batch, name), values, err_msg=name)
        else:
            assert tokens.batch.advantages is None and tokens.batch.keep is None
    assert step.update()["actor/updates"] == len(step.cut.rows) and one.batches == [None, None]


EXCHANGES = [  # rows are there, gaps, corrections, advantages, and all is done
    ((), 5),
    (("algorithm.anchor=on_policy", "actor.ppo_mini_batch_size=6"), 4),
    (("algorithm.adv_estimator=reinforce_plus_plus", *KL), 6),
    (("algorithm.policy_loss.loss_mode=kl_cov",), 6),
]


@pytest.mark.parametrize(("overrides", "exchanges"), EXCHANGES)
def test_ranks_exchange_once_where_a_number_of_all_rows_is_needed(overrides, exchanges):
    actor = Noisy(load_config(TINY, None, [*SIZES, *overrides]).config, 2)
    scored_step(actor, rollouts_of(stored(samples())))
    assert actor.together.calls == exchanges


def test_a_rank_is_asked_for_its_verbs_and_nothing_else():
    worker = ActorWorker.__new__(ActorWorker)
    worker.rank = 0
    worker.actor = SimpleNamespace(bring=lambda *kinds: kinds, close=None)
    assert worker.do("bring", "a", "b") == ("a", "b")
    with pytest.raises(ValueError, match="asked to close"):
        worker.do("close")
    source = ast.parse((Path(cut.__file__).parent / "actor.py").read_text())  # to import it takes ten seconds
    assert set(MODEL_VERBS) <= {node.name for node in ast.walk(source) if isinstance(node, ast.FunctionDef)}


# --- a rank that fails, and a wish to stop ----------------------------------------------------------------------------


def ends_of(actor: Replicas, rollouts) -> list[str]:
    """How each rank ends a step."""
    ended = {}
    begun = RankStep.score

    def noted(self, *arguments):
        try:
            return begun(self, *arguments)
        except Exception as error:
            ended[self._actor.rank] = f"{type(error).__name__}: {error}"
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankStep, "score", noted)
        with pytest.raises(Exception):  # noqa: B017
            scored_step(actor, rollouts)
    return [ended[rank] for rank in range(len(actor.actors))]


@pytest.mark.parametrize("failing", [0, 3, 6])  # of an earlier stage and of the last one
@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("fetched", Interrupted("a node is gone"), "Interrupted: a node is gone"),
        ("fetched", DataError("no such rows"), "DataError: no such rows"),
        ("_corrected", NumericAbort("too far"), "NumericAbort: too far"),
        ("_set_advantages", ValueError("a defect"), "FailedElsewhere: rank {} failed: a defect"),
    ],
)
def test_what_one_rank_fails_with_ends_the_step_on_all_with_the_same_words(failing, name, error, said, monkeypatch):
    actor = Staged(load_config(TINY, None, list(SIZES)).config, 2)
    where = RankBatch if name == "fetched" else RankStep
    method = getattr(where, name)

    def failed(given, *arguments):
        if (given if name == "fetched" else given._actor).rank == failing:
            raise error
        return method(given, *arguments)

    monkeypatch.setattr(where, name, staticmethod(failed) if name == "fetched" else failed)
    found = ends_of(actor, rollouts_of(stored(samples())))
    own = found.pop(failing)
    assert own == f"{type(error).__name__}: {error}" and set(found) == {said.format(failing)}


def test_a_wish_to_stop_that_one_rank_hears_in_a_pass_ends_all_ranks_after_it():
    actor = Noisy(load_config(TINY, None, [*SIZES, *KL]).config, 3)
    heard = []
    actor.stops = lambda rank: rank in heard
    scores, passes = actor.actors[1].policy_log_probs, []

    def score(*arguments):
        heard.append(1)
        return scores(*arguments)

    actor.actors[1].policy_log_probs = score
    for each in actor.actors:
        each.reference_log_probs = lambda *_: passes.append("reference")
    found = ends_of(actor, rollouts_of(stored(samples())))
    assert set(found) == {"Interrupted: the ranks were asked to stop"} and not passes


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("whitened", [False, True])
def test_a_users_advantage_is_asked_once_a_step_and_all_ranks_have_its_numbers(tmp_path, replicas, whitened):
    name = f"drawn_{replicas}_{whitened}"
    own = tmp_path / "own.py"
    own.write_text(
        "import numpy as np\nfrom mrl.algo.advantages import register_advantage\nASKED = []\n"
        f"@register_advantage({name!r}, whitened={whitened})\n"
        "def drawn(inputs):\n    ASKED.append(1)\n    return np.random.random(len(inputs.scores)) + len(ASKED)\n"
    )
    given = (f"algorithm.adv_estimator={name}", f"algorithm.custom_advantage.path={own}")
    actor = Noisy(load_config(TINY, None, [*SIZES, *given]).config, replicas)
    with tried_advantage(str(own), name):
        step, scored = scored_step(actor, rollouts_of(stored(samples())))
    held = [step.cut.needed_rows(replica) for replica in range(replicas)]
    column = actor.of_tokens("advantages", held)
    firsts = column[np.cumsum(step.rows.response_lengths) - 1]
    assert len(set(firsts.tolist())) == PROMPTS * N, "each response has a number of its own, on whichever rank it is"
    if whitened:
        assert scored.metrics["critic/advantages/mean"] == pytest.approx(0.0, abs=1e-6)
    else:
        assert scored.metrics["critic/advantages/min"] >= 1 and scored.metrics["critic/advantages/max"] < 2


def test_a_log_prob_that_is_not_finite_is_told_by_the_steps_row():
    config = load_config(TINY, None, SIZES).config
    many = samples()
    row = next(i for i, s in enumerate(many) if len(s.response_ids) > 3)
    spoilt = (*many[row].rollout_log_probs[:2], math.nan, *many[row].rollout_log_probs[3:])
    many[row] = Sample(0, 0, row, 0, many[row].prompt_ids, many[row].response_ids, spoilt, "stop", 0)
    with pytest.raises(NumericAbort, match=f"rollout_log_probs: 1 of .* row {row + 1}, token 2"):
        scored_step(Replicas(config, 3), rollouts_of(stored(many)))


# --- responses that stay where they are -------------------------------------------------------------------------------


def test_references_of_a_replicas_rows_are_written_once_for_all_of_its_ranks(monkeypatch):
    put = []
    monkeypatch.setattr(actor_group.ray, "put", lambda value: put.append(value) or ("reference to", value))
    first, second = stored(samples()[:3]), stored(samples()[3:5])
    arguments = [(first, "own 0", {}), (second, "own 1", {}), (first, "own 0", {}), (second, "own 1", {})]
    found = actor_group.put_once(arguments)
    assert put == [first, second]
    assert found == [[("reference to", each), own, {}] for each, own, _ in arguments]
    assert actor_group.put_once([("log_probs",), ("log_probs",)]) == [["log_probs"], ["log_probs"]] and len(put) == 2


def test_what_the_driver_holds_of_a_response_does_not_grow_with_its_length():
    def held(tokens: int) -> int:
        made = packed([Sample(0, 0, i, 0, (1,) * 9, (2,) * tokens, (-0.5,) * tokens, "stop", 0) for i in range(4)])
        return sum(column.nbytes for column in made.numbers.arrays.values())

    assert held(1) == held(20_000) <= 4 * 100


def told_together(count: int) -> InMemory:
    """Responses of a block each, as their engine tells of them."""
    made = packed([Sample(0, 0, i, 10 * i, (1,), (2,), (-0.5,), "stop", i % 3) for i in range(count)])
    rows = SampleRows.from_bytes(made.numbers.to_bytes())
    return InMemory.of_blocks(rows, [1] * count, [ResponseBlock(f"block {i}", None, "node") for i in range(count)])


def test_a_response_that_is_kept_alone_has_no_columns_of_its_own():
    told_together(20).row(0)  # what is made once is there
    tracemalloc.start()
    try:
        kept = [told.row(i) for told in [told_together(20) for _ in range(50)] for i in range(20)]
        held = tracemalloc.get_traced_memory()[0] / len(kept)
    finally:
        tracemalloc.stop()
    assert held < 600  # columns of its own take 2,000


def test_another_process_gets_no_other_rows_with_a_response():
    alone, beside = told_together(1).row(0), told_together(200).row(0)
    assert len(pickle.dumps(beside)) < len(pickle.dumps(alone)) + 100
    again = pickle.loads(pickle.dumps(told_together(200).row(7)))
    assert again.blocks == told_together(200).row(7).blocks
    assert (len(again), len(again.numbers), again.rows.seed.tolist(), again.block_row.tolist()) == (1, 1, [70], [0])


def test_responses_that_are_kept_alone_are_joined_in_any_order():
    first, second = told_together(5), told_together(7)
    parts = [second.row(6), first, second.row(0), first.row(3).row(0), second.take(np.array([4, 2]))]
    joined = InMemory.joined(parts)
    assert joined.rows.seed.tolist() == [60, 0, 10, 20, 30, 40, 0, 30, 40, 20]
    assert joined.rows.span_versions.tolist() == [0, 0, 1, 2, 0, 1, 0, 0, 1, 2]
    blocks = [joined.blocks[number].samples for number in joined.block]
    assert blocks == [f"block {seed // 10}" for seed in joined.rows.seed.tolist()] and not joined.block_row.any()
    marked = first.row(3).as_context(np.array([True]))
    assert marked.rows.sampled_lengths.tolist() == [0] and first.rows.sampled_lengths.tolist() == [1] * 5
    renumbered = first.row(3).renumbered(np.array([8]), np.array([9])).rows
    assert (renumbered.group_id.tolist(), renumbered.sample_id.tolist()) == ([8], [9])


def test_long_responses_are_blocks_of_their_own_and_short_ones_share_one():
    short, long = (
        samples()[:3],
        [Sample(0, 0, i, 0, (1,), (2,) * BLOCK_BYTES, (0.0,) * BLOCK_BYTES, "stop", 0) for i in (3, 4)],
    )
    assert (len(stored(short).blocks), len(stored(long).blocks)) == (1, 2)


def test_any_rows_are_read_in_their_order_and_unused_blocks_are_given_up():
    many = samples()
    parts = InMemory.joined([stored(many[:10]), stored(many[10:11]), stored(many[11:])])
    index = np.array([23, 0, 12, 3])
    some = parts.take(index).renumbered(np.array([9, 8, 7, 6]), np.arange(4))
    assert len(parts.blocks) == 3 and len(some.blocks) == 2
    found, expected = some.read(), packed([many[i] for i in index])
    assert np.array_equal(found.token_ids, expected.token_ids) and np.array_equal(
        found.rollout_log_probs, expected.rollout_log_probs
    )
    assert found.group_id.tolist() == [9, 8, 7, 6] and found.sample_id.tolist() == [0, 1, 2, 3]
    assert np.array_equal(some.rows.seed, expected.seed)
    for row in range(len(many)):
        alone, taken = parts.row(row), parts.take(np.array([row]))
        assert alone.blocks == taken.blocks and alone.block_row == taken.block_row and alone.block == taken.block == 0
        assert alone.versions.tolist() == taken.rows.span_versions.tolist()
        assert alone.lengths == (taken.rows.prompt_lengths[0], taken.rows.response_lengths[0])
        for name, column in alone.rows.arrays.items():
            np.testing.assert_array_equal(column, taken.rows.arrays[name], err_msg=name)


def test_rows_that_are_kept_alone_share_their_block_again_when_they_are_joined():
    """A rank fetches each block once, not once for each response in it."""
    many = samples()
    told = [stored(many[:10]), stored(many[10:])]
    order = np.random.default_rng(0).permutation(len(many))
    kept = [told[0].row(i) if i < 10 else told[1].row(i - 10) for i in order]
    joined = InMemory.joined(kept)
    assert {id(block) for block in joined.blocks} == {id(told[0].blocks[0]), id(told[1].blocks[0])}
    assert len(joined.blocks) == 2
    found, expected = joined.read(), packed([many[i] for i in order])
    for name, column in expected.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], column, err_msg=name)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_log_probs_of_rows_are_those_that_their_replica_computed(replicas, tmp_path):
    """Wherever rows lie; those with the largest mean difference among them."""
    config, given = load_config(TINY, None, SIZES).config, samples()
    rollouts = rollouts_of(stored(given))
    step, scored = scored_step(Noisy(config, replicas), rollouts)
    rollout = [np.array(one.rollout_log_probs, np.float32) for one in given]
    expected = [each + noise(each, 1000) for each in rollout]
    found = step.log_probs_of([0, 5, 17, 23])
    assert sorted(found) == [0, 5, 17, 23] and all((found[row] == expected[row]).all() for row in found)
    gaps = [np.abs(a - b).mean() for a, b in zip(expected, rollout, strict=True)]
    assert scored.gaps["log_gap"] / step.rows.sampled_lengths == pytest.approx(gaps, rel=1e-4)
    record_shown_rows(RunDir(tmp_path), 4, step, scored.gaps, rollouts)
    shown = read_shown_rows(tmp_path)
    assert shown.step == 4 and len(shown.log_probs) == 9
    assert all(values == pytest.approx(expected[row], abs=1e-6) for row, values in shown.log_probs.items())


def test_on_policy_no_log_probs_are_there_to_be_shown(tmp_path):
    config = load_config(
        TINY, None, [*SIZES, "algorithm.anchor=on_policy", f"actor.ppo_mini_batch_size={PROMPTS}"]
    ).config
    rollouts = rollouts_of(stored(samples()))
    step, scored = scored_step(Noisy(config, 2), rollouts)
    record_shown_rows(RunDir(tmp_path), 4, step, scored.gaps, rollouts)
    assert read_shown_rows(tmp_path) is None


def test_what_is_only_looked_at_ends_no_run_and_what_the_run_meets_does(tmp_path, capsys):
    config, rollouts = load_config(TINY, None, SIZES).config, rollouts_of(stored(samples()))
    step, scored = scored_step(Noisy(config, 2), rollouts)
    (tmp_path / "file").touch()
    record_shown_rows(RunDir(tmp_path / "file"), 4, step, scored.gaps, rollouts)
    assert "log-probs to look at of step 4 are not written: NotADirectoryError" in capsys.readouterr().out

    def lost(rows):
        raise Interrupted("rank 1 is lost")

    step.log_probs_of = lost
    with pytest.raises(Interrupted):
        record_shown_rows(RunDir(tmp_path), 4, step, scored.gaps, rollouts)


class WriterHere(SampleWriter):
    """Its process is this one; `received`: response tokens whose log-probs came to it."""

    def __init__(self, folder, kept):
        process, self._kept, self._under_way, self.received = _Writer(folder, math.inf), kept, {}, 0
        self._has_images_of_turns = False
        self._writer = SimpleNamespace(
            write=SimpleNamespace(remote=process.write),
            write_differences=SimpleNamespace(remote=self._counted(process.write_differences)),
        )

    def _counted(self, write):
        def counted(step, rows, *parts):
            self.received += sum(map(len, parts))
            return write(step, rows, *parts)

        return counted


@pytest.mark.parametrize("kept", ["all", 7, 1])
@pytest.mark.parametrize("replicas", [1, 3])
def test_the_two_files_of_a_step_are_of_the_same_rows_and_nothing_else_travels(tmp_path, replicas, kept):
    config = load_config(TINY, None, list(SIZES)).config
    actor, rollouts = Noisy(config, replicas), rollouts_of(stored(samples()))
    step, _ = scored_step(actor, rollouts)
    writer = WriterHere(tmp_path, kept)
    writer.write(5, rollouts.samples, rollouts.results)
    writer.write_differences(5, step)
    written, file = read_samples(tmp_path, 5), StepFile(tmp_path, 5)
    assert len(written) == (PROMPTS * N if kept == "all" else kept)
    ids = pq.read_table(tmp_path / "step-5.log_probs.parquet")["sample_id"].to_pylist()
    assert sorted(ids) == [row["sample_id"] for row in written]
    for row, found in zip(written, file.differences([row["sample_id"] for row in written]), strict=True):
        own = np.array(row["rollout_log_probs"], np.float32)
        assert found == (own + noise(own, 1000) - own).astype(np.float16).tolist()
    assert writer.received == sum(len(row["response_ids"]) for row in written)
