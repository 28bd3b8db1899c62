"""A response whose agent went back: branches in one row, each a sequence to the model, each sampled token trained once,
one outcome and one place in the group.
"""

import itertools
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from replicas import scorers
from segment_checks import token_versions
from test_trajectory import BY_NAME, Small, free_of_context, measured
from trajectories import trajectories

import mrl.cli.samples as samples_command
from mrl.algo.aggregate import Denominators
from mrl.algo.losses import LossInputs, PolicyLossParameters, policy_loss
from mrl.algo.rows import row_sums
from mrl.algo.spec import AGGREGATIONS, LOSSES
from mrl.cli.main import main
from mrl.config.actor_rules import longest_sample
from mrl.config.load import load_config
from mrl.data.batch import TrainBatch
from mrl.data.samples import Sample, SampleRows, Samples, Turn, packed
from mrl.errors import DataError
from mrl.generate.rollouts import Judge
from mrl.model import model_spec
from mrl.rank.cut import MicroRows, ReplicaCut, RowLengths, Splitter
from mrl.rank.packing import Shape, micro_batch
from mrl.rank.row_results import check_batch
from mrl.record.metrics import length_metrics, turn_metrics
from mrl.record.sample_files import read_samples, write_samples
from mrl.reward.items import OK, Question, RewardResult
from mrl.schedule.branches import Branch, as_one_row
from mrl.tools.report.samples import looked_at
from mrl.units import round_up


def one(response, sampled, starts, version=5, log_probs=None, prompt=(7, 8)) -> Samples:
    turns = tuple(Turn(start, "stop") for start in starts)
    values = log_probs or [-0.1 * token if mine else 0.0 for token, mine in zip(response, sampled, strict=True)]
    return packed([Sample(3, 0, 1, 11, prompt, response, values, "stop", version, sampled=sampled, turns=turns)])


FIRST = one((1, 2, 5, 3), (1, 1, 0, 1), (0, 3))
SECOND = one((1, 2, 6, 4), (1, 1, 0, 1), (0, 3), version=6)
BOTH = as_one_row([Branch(FIRST), Branch(SECOND, 1)])
PLAIN = packed([Sample(4, 1, 2, 12, (7,), (4, 4), (-0.4, -0.5), "length", 5)])


def same(one: Samples, other: Samples) -> bool:
    return one.arrays.keys() == other.arrays.keys() and all(
        np.array_equal(column, other.arrays[name]) and column.dtype == other.arrays[name].dtype
        for name, column in one.arrays.items()
    )


def test_the_example_of_the_modules():
    assert BOTH.token_ids.tolist() == [7, 8, 1, 2, 5, 3, 7, 8, 1, 2, 6, 4]
    assert BOTH.sampled.tolist() == [True, True, False, True] + [False] * 5 + [True]
    np.testing.assert_allclose(BOTH.rollout_log_probs, [-0.1, -0.2, 0, -0.3, 0, 0, 0, 0, 0, -0.4], rtol=1e-6)
    assert (BOTH.branch_starts.tolist(), BOTH.branch_prompts.tolist()) == ([0, 4], [0, 2])
    assert (BOTH.turn_starts.tolist(), BOTH.turn_counts.tolist()) == ([0, 3, 9], [3])
    assert (BOTH.sampled_lengths.tolist(), BOTH.response_lengths.tolist()) == ([4], [10])
    assert BOTH.sequence_lengths.tolist() == [6, 6] and BOTH.longest_responses.tolist() == [4]
    assert token_versions(BOTH).tolist() == [5] * 4 + [6] * 6
    ((prompt, response),) = BOTH.spoken_last()
    assert (prompt.tolist(), response.tolist()) == ([7, 8], [1, 2, 6, 4])


def test_a_branch_with_a_prompt_of_its_own_shares_nothing():
    other = one((9,), (1,), (0,), prompt=(4, 4, 4))
    made = as_one_row([Branch(FIRST), Branch(other)])
    assert made.token_ids.tolist()[6:] == [4, 4, 4, 9] and made.sampled.tolist()[4:] == [False] * 3 + [True]
    assert made.sequence_lengths.tolist() == [6, 4] and made.turn_starts.tolist() == [0, 3, 7]
    assert [part.tolist() for part in next(made.spoken_last())] == [[4, 4, 4], [9]]
    assert token_versions(made).tolist() == [5] * 8 and made.span_counts.tolist() == [1]


def test_one_branch_is_the_row_that_it_was():
    assert same(as_one_row([Branch(FIRST)]), FIRST)


def test_what_no_row_can_be_made_of_is_refused():
    with pytest.raises(DataError, match="shares turns with one that is not there"):
        as_one_row([Branch(FIRST, 1)])
    with pytest.raises(DataError, match="says nothing that another does not say"):
        as_one_row([Branch(FIRST), Branch(SECOND, 2)])


def test_rows_with_branches_stand_beside_others_and_come_apart_again():
    both = Samples.joined([PLAIN, BOTH, FIRST])
    assert both.branch_counts.tolist() == [1, 2, 1] and both.branch_starts.tolist() == [0, 0, 4, 0]
    assert both.sequence_lengths.tolist() == [3, 6, 6, 6] and both.longest_responses.tolist() == [2, 4, 4]
    assert [response.tolist() for _, response in both.spoken_last()] == [[4, 4], [1, 2, 6, 4], [1, 2, 5, 3]]
    assert same(both.rows(slice(1, 2)), BOTH)
    turned = both.rows(np.array([2, 1]))
    assert turned.branch_starts.tolist() == [0, 0, 4] and turned.sequence_lengths.tolist() == [6, 6, 6]


def test_numbers_of_branches_come_through_bytes_and_cost_nothing_where_there_are_none():
    for some in (Samples.joined([PLAIN, BOTH]), FIRST, PLAIN, packed([])):
        found = SampleRows.from_bytes(some.numbers.to_bytes())
        assert found.arrays.keys() == some.numbers.arrays.keys()
        assert all(np.array_equal(found.arrays[name], column) for name, column in some.numbers.arrays.items())
    without = replace(BOTH, branch_counts=None, branch_starts=None, branch_prompts=None).numbers
    sizes = [len(zlib.decompress(each.to_bytes())) for each in (BOTH.numbers, without)]
    assert sizes[0] - sizes[1] == 4 * (1 + 2 + 2)
    assert not {"branch_counts", "branch_starts", "branch_prompts"} & Samples.joined([PLAIN, FIRST]).arrays.keys()


# --- to the model -----------------------------------------------------------------------------------------------------


def batch_of(samples: Samples) -> TrainBatch:
    return TrainBatch.of(samples, 1.0)


def test_each_branch_is_a_sequence_and_the_row_is_one_row_of_the_loss():
    laid_out = micro_batch(batch_of(Samples.joined([BOTH, PLAIN])), np.array([0, 1]), Shape(packed=True))
    assert laid_out.sequence_starts.tolist() == [0, 6, 12, 15]
    assert laid_out.position_ids.tolist() == [[0, 1, 2, 3, 4, 5] * 2 + [0, 1, 2]]
    assert laid_out.targets.tolist() == [1, 2, 3, 4, 4, 4]
    assert laid_out.predictors.tolist() == [1, 2, 4, 10, 12, 13]
    assert laid_out.response_mask.shape == (2, 10) and laid_out.slots.tolist() == [0, 1, 3, 9, 10, 11]


@pytest.mark.parametrize("context", [2, 4])
def test_context_parallel_ranks_predict_every_token_of_every_branch_once(context):
    batch = batch_of(Samples.joined([PLAIN, BOTH]))
    found = {}
    for rank in range(context):
        part = micro_batch(batch, np.array([0, 1]), Shape(True, context), rank)
        states = part.input_ids.ravel()[part.predictors]
        own = dict(zip(part.slots.tolist(), zip(states.tolist(), part.targets.tolist(), strict=True), strict=True))
        assert not own.keys() & found.keys()
        found |= own
    assert found == {0: (7, 4), 1: (4, 4), 10: (8, 1), 11: (1, 2), 13: (5, 3), 19: (6, 4)}


def test_a_branch_that_begins_with_a_trained_token_is_refused(tmp_path):
    from small_model import SIZES

    batch = batch_of(BOTH)
    check_batch(batch, model_spec(SIZES), 0)
    sampled = BOTH.sampled.copy()
    sampled[4] = True
    with pytest.raises(DataError, match="row 1 of the batch has a branch without a prompt"):
        check_batch(replace(batch, sampled=sampled), model_spec(SIZES), 0)


def drawn_lengths(rng: np.random.Generator) -> RowLengths:
    """Rows of one to four sequences."""
    counts = rng.integers(1, 5, rng.integers(4, 30))
    return RowLengths(rng.integers(1, 50, int(counts.sum())), counts)


TOOLS = "parallel_configs/tool-moe/cpu.yaml"
SHAPES = [Shape(True), Shape(True, context=2), Shape(True, context=4, tensor=2)]


@pytest.mark.parametrize("shape", SHAPES, ids=["whole", "context 2", "context 4, tensor 2"])
def test_a_cut_costs_and_pads_what_the_same_sequences_do_as_rows_of_their_own(shape):
    rng = np.random.default_rng(2)
    for _ in range(50):
        lengths = drawn_lengths(rng)
        splitter = Splitter(shape, int(rng.integers(1, 4)), 1, max_tokens=400, per_token=1.0, per_pair=2.0)
        shares = splitter.shares(lengths)
        alone = RowLengths(lengths.sequences)
        apart = tuple(tuple(replace(micro, rows=lengths.indices(micro.rows)) for micro in rank) for rank in shares)
        assert splitter.load(lengths, shares) == splitter.load(alone, apart)
        assert splitter.costs(lengths).sum() == pytest.approx(splitter.costs(alone).sum())
        packs = [alone.rows(micro.rows).sequences for rank in apart for micro in rank]
        assert max(shape.tokens(pack) for pack in packs) <= 400 * shape.context


def test_costs_and_padding_of_branches_worked_by_hand():
    """Of two context-parallel ranks sequences of 5 and 3 tokens take 8 and 4; attention compares 15 and 6 pairs."""
    lengths = RowLengths(np.array([5, 3, 8]), np.array([2, 1]))
    splitter = Splitter(Shape(True, context=2), 1, 1, max_tokens=6, per_token=0.0, per_pair=1.0)
    assert splitter.costs(lengths).tolist() == [15 + 6, 36]
    shares = splitter.shares(lengths)
    assert splitter.load(lengths, shares).padding_share == pytest.approx(1 - 16 / 20)
    assert splitter.load(lengths, shares).budget_share == 1.0
    with pytest.raises(DataError, match="row 1 of the batch has 8 tokens, more than a micro-batch may hold"):
        replace(splitter, max_tokens=5).shares(lengths)


@pytest.mark.parametrize("context", [1, 2, 4])
def test_a_budget_that_the_rules_allow_holds_any_response_of_an_agent(context):
    agent = ["rollout.endpoint=true", "rollout.agent={path: agent.py}", "rollout.turns={network: true, max_turns: 6}"]
    size = ["data.max_prompt_length=16", "data.max_response_length=104"]
    config = load_config(TOOLS, None, [*agent, *size, f"actor.layout.context_parallel_size={context}"]).config
    layout = config.actor.layout
    least = -(-longest_sample(config) // context)
    splitter = Splitter(Shape(True, context, layout.tensor_model_parallel_size), 1, 1, max_tokens=least)
    rng = np.random.default_rng(context)
    for _ in range(200):
        branches = int(rng.integers(1, 7))
        ends = np.sort(rng.choice(np.arange(1, 120), branches - 1, replace=False))
        sequences = np.diff([0, *ends, 120])
        (rank,) = splitter.shares(RowLengths(sequences, np.array([branches])))
        assert len(rank) == 1
    if context > 1:
        too_small = replace(splitter, max_tokens=120 // context)
        with pytest.raises(DataError, match="row 1"):
            too_small.shares(RowLengths(np.array([1, 1, 1, 1, 1, 115]), np.array([6])))


@pytest.mark.parametrize("shape", SHAPES[1:], ids=["context 2", "context 4, tensor 2"])
def test_a_step_with_branches_lays_out_what_its_cut_has_counted(as_rows, shape):
    """A micro-batch of each context-parallel rank is within its limit, and together they are what the load says."""
    batch = batch_of(as_rows[1])
    lengths = RowLengths.of(batch)
    limit = round_up(int(lengths.tokens.max()), shape.total_multiple) // shape.context + 4 * shape.sequence_multiple
    splitter = Splitter(shape, 2, 1, max_tokens=limit)
    shares = splitter.shares(lengths)
    computed = 0
    for micro in itertools.chain.from_iterable(shares):
        sizes = [micro_batch(batch, micro.rows, shape, rank).input_ids.size for rank in range(shape.context)]
        assert max(sizes) <= limit
        computed += sum(sizes)
    assert splitter.padding_share(lengths, shares) == pytest.approx(1 - len(batch.token_ids) / computed)


@pytest.mark.parametrize("shape", SHAPES, ids=["whole", "context 2", "context 4, tensor 2"])
def test_ranks_that_share_a_batch_with_branches_see_each_token_once(as_rows, shape):
    """What a rank's routers see of it, by the cut, is what they are given."""
    batch = batch_of(as_rows[1])
    lengths = RowLengths.of(batch)
    cut = ReplicaCut((), (MicroRows(np.arange(len(batch))),), ())
    seen = np.zeros(len(batch.token_ids), int)
    for context, tensor in itertools.product(range(shape.context), range(shape.tensor)):
        seen += cut.computed(lengths, shape, context, tensor)
    assert (seen == 1).all()
    laid_out = micro_batch(batch, np.arange(len(batch)), shape)
    own = sum(cut.computed(lengths, shape, 0, tensor) for tensor in range(shape.tensor))
    assert laid_out.input_ids[laid_out.real].tolist() == batch.token_ids[np.flatnonzero(own)].tolist()


def cut_at_turns(sample: Sample) -> Samples:
    """The same trajectory as branches: after each turn the agent goes back, and on behind it with what it heard."""
    ends = [turn.start for turn in sample.turns[1:]] + [len(sample.response_ids)]
    branches = []
    for number, end in enumerate(ends):
        last = max(i for i in range(end) if sample.sampled[i]) + 1  # a branch ends with what was said
        part = replace(
            sample,
            response_ids=sample.response_ids[:last],
            rollout_log_probs=np.array(sample.rollout_log_probs)[:last],
            sampled=sample.sampled[:last],
            turns=sample.turns[: number + 1],
        )
        branches.append(Branch(packed([part]), number))
    return as_one_row(branches)


ROWS = trajectories()


@pytest.fixture(scope="module")
def as_rows() -> tuple[Samples, Samples]:
    """Trajectories as one sequence each, and cut."""
    cut = Samples.joined([cut_at_turns(sample) for sample in ROWS])
    assert cut.branch_counts.max() == 4 and (cut.branch_counts == 1).any()
    return packed(ROWS), cut


def model_log_probs(model: Small, laid_out) -> torch.Tensor:
    """[rows, response_length]: each sequence of the pack by itself, as token_outputs of forward.py gathers them."""
    ids = torch.from_numpy(laid_out.input_ids.ravel())
    starts = laid_out.sequence_starts.tolist()
    sequences = [model(ids[start:end]) for start, end in itertools.pairwise(starts)]
    own = torch.cat(sequences)[torch.from_numpy(laid_out.predictors), torch.from_numpy(laid_out.targets)]
    flat = own.new_zeros(laid_out.response_mask.size).index_put((torch.from_numpy(laid_out.slots),), own)
    return flat.view(laid_out.response_mask.shape)


def gradient(samples: Samples, loss_mode: str, aggregation: str) -> tuple[float, np.ndarray]:
    """Loss and gradient of a step on rows whose values of sampled tokens follow from their order alone."""
    batch = batch_of(samples)
    rng = np.random.default_rng(1)
    count = int(batch.is_sampled.sum())
    own = {
        "old_log_probs": -3 + 0.3 * rng.normal(size=count),
        "ref_log_probs": -3 + 0.3 * rng.normal(size=count),
        "advantages": rng.normal(size=count),
        "loss_weights": 0.5 + rng.random(count),
        "selected": rng.random(count) < 0.3,
    }
    kept = rng.random(count) < 0.9
    values = {}
    for name, column in own.items():
        flat = np.full(len(batch.is_sampled), np.nan if column.dtype != bool else True)
        flat[batch.is_sampled] = column
        values[name] = flat.astype(bool if column.dtype == bool else np.float32)
    keep = np.ones(len(batch.is_sampled), bool)
    keep[batch.is_sampled] = kept
    batch = replace(batch, keep=keep, **values)
    laid_out = micro_batch(batch, np.arange(len(batch)), Shape(packed=True))
    model = Small().double()
    values = {name: value for name, value in laid_out.token_values.items() if value is not None}
    given = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in values.items()}
    given = {name: value if value.dtype == torch.bool else value.double() for name, value in given.items()}
    log_probs = model_log_probs(model, laid_out)
    weights = given.pop("loss_weights")
    inputs = LossInputs(
        log_probs, response_mask=torch.from_numpy(laid_out.response_mask), entropy=-log_probs, weights=weights, **given
    )
    parameters = PolicyLossParameters(
        loss_mode, aggregation, 0.2, 0.3, loss_scale_factor=50.0, entropy_coeff=0.1, kl_loss_coef=0.1
    )
    counted = Denominators.counted(row_sums(batch.loss_mask, batch.response_lengths))
    loss = policy_loss(parameters, inputs, counted).loss
    loss.backward()
    return loss.item(), np.concatenate([each.grad.numpy().ravel() for each in model.parameters()])


@pytest.mark.parametrize("loss_mode", LOSSES)
def test_one_trajectory_as_one_sequence_and_cut_into_branches_have_the_same_gradient(as_rows, loss_mode):
    """A mean over sequences counts it once, and a ratio of the sequence is over all that was sampled in it."""
    whole, cut = as_rows
    for aggregation in AGGREGATIONS:
        loss, expected = gradient(whole, loss_mode, aggregation)
        other, found = gradient(cut, loss_mode, aggregation)
        assert np.abs(expected).max() > 1e-3
        assert other == pytest.approx(loss, rel=1e-12)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12, err_msg=aggregation)


def test_the_gradient_sees_a_branch_that_is_taken_for_more_of_the_same_sequence(as_rows):
    cut = as_rows[1]
    blind = replace(cut, branch_counts=None, branch_starts=None, branch_prompts=None)
    right = gradient(cut, "vanilla", "token-mean")[1]
    wrong = gradient(blind, "vanilla", "token-mean")[1]
    assert np.linalg.norm(wrong - right) > 0.01 * np.linalg.norm(right)


@BY_NAME
def test_every_number_of_a_step_is_that_of_the_trajectory_in_one_sequence(as_rows, overrides):
    """From StepBatch to the update: group, baseline, corrections, filters and metrics see the trajectory once."""
    overrides = [each for each in overrides if "overlong_buffer" not in each]
    if any("clip_cov" in each and "loss_mode" in each for each in overrides):
        pytest.skip("a token's lot is drawn by its place")
    metrics, gradients = measured(as_rows[0], overrides)
    others, found = measured(as_rows[1], overrides)
    assert free_of_context(others).keys() == free_of_context(metrics).keys()
    assert free_of_context(others) == pytest.approx(free_of_context(metrics), rel=1e-9, abs=1e-12)
    assert found.keys() == gradients.keys() and len(found) == len(ROWS)
    for key, expected in gradients.items():
        np.testing.assert_allclose(found[key], expected, rtol=1e-9, atol=1e-15)


# --- what people and rewards see --------------------------------------------------------------------------------------


def test_a_length_is_that_of_the_longest_branch():
    rows = Samples.joined([BOTH, PLAIN]).numbers
    assert length_metrics(rows, 10, 10)["response_length/clip_ratio"] == 0.0
    assert length_metrics(rows, 10, 4)["response_length/clip_ratio"] == 0.5
    assert (turn_metrics(rows)["turns/mean"], turn_metrics(rows)["turns/context_tokens"]) == (2.0, 3.0)


def test_an_overlong_penalty_is_of_the_longest_branch():
    from test_step_batch import SIZES, TINY

    given = ["enable=true", "len=2", "penalty_factor=1.0"]
    config = load_config(TINY, None, [*SIZES, *(f"algorithm.overlong_buffer.{each}" for each in given)]).config
    judge = Judge(config.algorithm, config.reward, 5)
    found = judge.rewards(BOTH.numbers, [RewardResult(0, 1.0, {}, OK)])
    assert found.tolist() == [0.5], "4 of 5 tokens are one of two into the buffer"


class Pool:
    """Takes what is to be judged."""

    def __init__(self):
        self.items = []

    def submit(self, item):
        self.items.append(item)

    def collect(self, wait_s):
        return [RewardResult(item.sample_id, 1.0, {}, OK) for item in self.items]


class Numbers:
    """A tokenizer whose text is numbers."""

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(map(str, ids))


def test_a_reward_is_given_what_was_spoken_last():
    pool = Pool()
    scorer = scorers(pool, Numbers()).channels[0].handle
    scorer.exchange([(0, 0, Question(0, "sums", "4"))], 0.0, BOTH)
    (item,) = pool.items
    assert item.response_text == "1 2 6 4" and item.extra_info["num_turns"] == 3


REWARDS = [{"score": 1.0, "reason": "ok"}, {"score": 0.0, "reason": "ok"}]


def test_files_have_branches_where_there_are_some(tmp_path):
    write_samples(tmp_path, 1, [BOTH, PLAIN], REWARDS, turns=True, branches=True)
    first, second = read_samples(tmp_path, 1)
    assert first["branches"] == [{"first_token": 0, "prompt_tokens": 0}, {"first_token": 4, "prompt_tokens": 2}]
    assert second["branches"] == [{"first_token": 0, "prompt_tokens": 0}]
    shown = {each.row: each for each in looked_at(tmp_path, 1, None)["best"]}
    begins = [[head.first_token for head in one.heads if head.words == "branch 2"] for one in (shown[0], shown[1])]
    assert begins == [[4], []]
    write_samples(tmp_path, 2, [FIRST], REWARDS[:1], turns=True)
    assert "branches" not in read_samples(tmp_path, 2)[0]


def test_the_command_shows_where_another_branch_begins(tmp_path, monkeypatch, capsys):
    (tmp_path / "samples").mkdir()
    write_samples(tmp_path / "samples", 1, [BOTH], REWARDS[:1], turns=True, branches=True)
    monkeypatch.setattr(samples_command, "_decoder", lambda config, stored: lambda ids: f"<{ids}>")
    main(["samples", str(tmp_path), "--turns"])
    assert capsys.readouterr().out.splitlines()[3:] == [
        "--- turn 1: stop", "<[1, 2]>", "--- context of turn 1, after 0.00 s", "<[5]>", "--- turn 2: stop", "<[3]>",
        "--- branch 2 begins with", "<[7, 8, 1, 2, 6]>", "--- turn 3: stop", "<[4]>",
    ]  # fmt: skip
