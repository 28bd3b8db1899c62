"""Which rows of a batch go through the model together, on which data-parallel rank. Pure numpy.

Every data-parallel rank gets the same number of micro-batches, because with expert parallelism each forward is a
collective over them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from mrl.config.schema import ActorConfig, RefConfig, TeacherConfig
from mrl.data.batch import TrainBatch
from mrl.data.row_columns import Columns, positions
from mrl.errors import DataError
from mrl.megatron.balance import balanced_parts, even_fit, first_fit, imbalance, sequence_costs, without_empty
from mrl.megatron.packing import Shape
from mrl.model import ModelSpec, forward_flops_per_token
from mrl.model.layout import TrainLayout
from mrl.units import round_up


@dataclass(frozen=True)
class MicroRows:
    """Rows that share one forward. Of a filler, which only keeps ranks in step, nothing counts."""

    rows: np.ndarray  # int64, indices into the batch
    is_filler: bool = False


@dataclass(frozen=True)
class RowLengths:
    """Tokens of the sequences that a model computes of rows: one a row, but for rows of several branches.

    A micro-batch has all sequences of a row. Each is padded, and attends to itself, by itself.
    """

    sequences: np.ndarray  # int64 [sequences], rows end to end
    counts: np.ndarray | None = None  # int64 [rows]: sequences of each, at least 1; None: 1 each

    @classmethod
    def of(cls, rows: Columns) -> "RowLengths":
        """The lengths of rows that have branches or none."""
        if rows.branch_counts is None:
            return cls(rows.lengths)
        return cls(rows.sequence_lengths, rows.branch_counts.astype(np.int64))

    def __len__(self) -> int:
        if self.counts is None:
            return len(self.sequences)
        return len(self.counts)

    @cached_property
    def tokens(self) -> np.ndarray:
        """int64 [rows]: tokens of each row, without padding."""
        return self.summed(self.sequences)

    def summed(self, values: np.ndarray) -> np.ndarray:
        """[rows]: the sum of each row's `values` [sequences]."""
        if self.counts is None:
            return values
        return np.add.reduceat(values, np.cumsum(self.counts) - self.counts)

    def places(self, rows: np.ndarray) -> np.ndarray:
        """int64: numbers of the sequences of `rows`, which are numbers of rows."""
        if self.counts is None:
            return rows
        return positions(self.counts, rows)

    def rows(self, rows: np.ndarray) -> "RowLengths":
        """The lengths of the given rows alone."""
        counts = None
        if self.counts is not None:
            counts = self.counts[rows]
        return RowLengths(self.sequences[self.places(rows)], counts)


_CLOSE = 1.001  # times the mean: micro-batches of one rank need not be nearer

Shares = tuple[tuple[MicroRows, ...], ...]  # [data-parallel rank][micro-batch]


@dataclass(frozen=True)
class MiniBatchLoad:
    """How one mini-batch lies on the data-parallel ranks; every rank knows it of all."""

    padding_share: float  # of the tokens that all ranks compute: alignment, and what fillers repeat
    imbalance: float  # cost of the costliest rank over the mean cost, less 1
    tokens: tuple[int, ...]  # trained by each rank, fillers left out
    packed_sequences: float | None = None  # of a pack, mean; None where sequences are padded
    budget_share: float | None = None  # of the token budget that the fullest micro-batch takes; None without one


@dataclass(frozen=True)
class RowResult:
    """Log-probabilities of the rows of a batch that one data-parallel replica computed."""

    rows: np.ndarray  # int64 [rows]: which rows of the batch these are
    log_probs: np.ndarray  # float32 [sampled tokens of these rows], end to end
    entropy: tuple[float, float]  # (sum over sampled tokens in nats, number of tokens)
    # of a teacher [sampled tokens of these rows, words]: its likeliest words, int32, and their log-probs, float32
    words: np.ndarray | None = None
    of_words: np.ndarray | None = None


@dataclass(frozen=True)
class UpdateResult:
    """What an update of several mini-batches hands to the driver, from one rank or from all of them.

    `parts`: metrics that add up over mini-batches and ranks, name -> (sum of value x weight, sum of weight).
    `loads`: one a mini-batch, from a single rank; the others have none.
    `old`: on policy the log-probs of the rows before the update, from the ranks of the last pipeline stage.
    `spent`: metrics of what it took on this rank, no two updates alike: time, peaks of memory.
    """

    parts: list[dict[str, tuple[float, float]]]
    loads: list[MiniBatchLoad]
    old: RowResult | None = None
    spent: dict[str, tuple[float, float]] = field(default_factory=dict, compare=False)


def mini_batches(num_rows: int, rows_per_mini_batch: int) -> Iterator[slice]:
    """Consecutive slices of rows, in order; the last may be shorter."""
    for start in range(0, num_rows, rows_per_mini_batch):
        yield slice(start, min(start + rows_per_mini_batch, num_rows))


@dataclass(frozen=True)
class Splitter:
    """How batches are cut: the degrees that matter, one of the two limits of a micro-batch,
    and what a sequence costs.
    """

    shape: Shape
    data_parallel: int
    micro_batch_size: int  # samples; used when max_tokens is None
    max_tokens: int | None = None  # tokens of one device in a micro-batch, alignment included
    count_multiple: int = 1  # the interleaved pipeline schedule needs a multiple of its stages
    per_token: float = 1.0  # see `sequence_costs`
    per_pair: float = 0.0

    @classmethod
    def for_update(cls, actor: ActorConfig, layout: TrainLayout, model: ModelSpec) -> "Splitter":
        """Splits rows for the update's forward-backward passes."""
        return cls._of(actor, layout, model, actor.ppo_micro_batch_size_per_gpu, actor.ppo_max_token_len_per_gpu)

    @classmethod
    def for_log_probs(cls, actor: ActorConfig, layout: TrainLayout, model: ModelSpec) -> "Splitter | None":
        """Splits rows for the old policy's forward-only passes.

        None when they have no limit of their own and are to be cut as the update is.
        """
        samples = actor.log_prob_micro_batch_size_per_gpu
        tokens = actor.log_prob_max_token_len_per_gpu
        if (tokens if actor.use_dynamic_bsz else samples) is None:
            return None
        return cls._of(actor, layout, model, samples or actor.ppo_micro_batch_size_per_gpu, tokens)

    @classmethod
    def for_reference(
        cls, actor: ActorConfig, ref: RefConfig, layout: TrainLayout, model: ModelSpec
    ) -> "Splitter | None":
        """Splits rows for the reference model, which has the actor's limits where it has none of its own.

        Where one of the two is cut by tokens and the other by samples, the update's cut cannot be the reference's. Then
        the reference has the update's limit of its own kind.
        """
        given = {
            "use_dynamic_bsz": ref.log_prob_use_dynamic_bsz,
            "log_prob_micro_batch_size_per_gpu": ref.log_prob_micro_batch_size_per_gpu,
            "log_prob_max_token_len_per_gpu": ref.log_prob_max_token_len_per_gpu,
        }
        own = actor.model_copy(update={name: value for name, value in given.items() if value is not None})
        if own.use_dynamic_bsz == actor.use_dynamic_bsz:
            return cls.for_log_probs(own, layout, model)
        samples = own.log_prob_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu
        return cls._of(
            own, layout, model, samples, own.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
        )

    @classmethod
    def for_teacher(
        cls, actor: ActorConfig, teacher: TeacherConfig, layout: TrainLayout, model: ModelSpec
    ) -> "Splitter":
        """Splits rows for the teacher in its own layout. It has the actor's limits where it has none of its own."""
        samples = teacher.log_prob_micro_batch_size_per_gpu or actor.log_prob_micro_batch_size_per_gpu
        tokens = teacher.log_prob_max_token_len_per_gpu or actor.log_prob_max_token_len_per_gpu
        return cls._of(
            actor,
            layout,
            model,
            samples or actor.ppo_micro_batch_size_per_gpu,
            tokens or actor.ppo_max_token_len_per_gpu,
        )

    @classmethod
    def _of(
        cls, actor: ActorConfig, layout: TrainLayout, model: ModelSpec, samples: int, tokens: int | None
    ) -> "Splitter":
        first_token = forward_flops_per_token(model, 1.0)
        per_pair = forward_flops_per_token(model, 2.0) - first_token
        return cls(
            shape=Shape(actor.use_remove_padding, layout.context, layout.tensor if layout.sequence_parallel else 1),
            data_parallel=layout.data,
            micro_batch_size=samples,
            max_tokens=tokens if actor.use_dynamic_bsz else None,
            count_multiple=layout.pipeline if layout.virtual_pipeline > 1 else 1,
            per_token=first_token - per_pair,
            per_pair=per_pair,
        )

    def shares(self, lengths: RowLengths, owners: list[np.ndarray] | None = None) -> Shares:
        """Puts every row into exactly one micro-batch that is no filler.

        Where `owners` does not say whose each row is, rows are dealt over ranks in equal numbers and at equal cost. A
        rank's rows are dealt over its micro-batches likewise where sequences are packed. Where they are padded, rows of
        like length go together. The largest forward comes first. Raises DataError for a row above the limit.
        """
        costs = self.costs(lengths)
        ranks = balanced_parts(costs, self.data_parallel) if owners is None else owners
        cut = self._cut(lengths, costs, ranks)
        tokens = lengths.tokens
        filler = MicroRows(np.array([int(tokens.argmin())]), is_filler=True)
        return tuple(tuple(MicroRows(rows) if len(rows) else filler for rows in _falling(tokens, rank)) for rank in cut)

    def costs(self, lengths: RowLengths) -> np.ndarray:
        """float64 [rows]: what it costs to compute the sequences of each row."""
        return lengths.summed(sequence_costs(lengths.sequences, self.per_token, self.per_pair))

    def _taken(self, lengths: RowLengths) -> np.ndarray:
        """int64 [rows]: tokens of each row in a pack, each of its sequences padded."""
        return lengths.summed(round_up_all(lengths.sequences, self.shape.sequence_multiple))

    def _cut(self, lengths: RowLengths, costs: np.ndarray, ranks: list[np.ndarray]) -> list[list[np.ndarray]]:
        """Rows of every rank's micro-batches, as many on each."""
        tokens = lengths.tokens
        if self.max_tokens is not None:
            self._check_longest(lengths)
        if not self.shape.packed:
            count = self._padded_count(tokens, ranks)
            return [np.array_split(rows[np.argsort(-tokens[rows], kind="stable")], count) for rows in ranks]
        if self.max_tokens is not None:
            return self._packs(lengths, costs, ranks)
        count = self._rounded(self._fewest(tokens, ranks))
        return [_of(rows, balanced_parts(costs[rows], count, _CLOSE * costs[rows].sum() / count)) for rows in ranks]

    def _packs(self, lengths: RowLengths, costs: np.ndarray, ranks: list[np.ndarray]) -> list[list[np.ndarray]]:
        """Packs each rank's rows under the limit of tokens.

        It takes as few packs as their sum allows where rows then fit evenly, else as few as fit.
        """
        limit = self._limit // self.shape.total_multiple * self.shape.total_multiple
        taken = self._taken(lengths)
        count = self._rounded(self._fewest(lengths.tokens, ranks))
        even = [even_fit(taken[rows], costs[rows], limit, count) for rows in ranks]
        if any(parts is None for parts in even):
            dense = [first_fit(taken[rows], limit) for rows in ranks]
            count = self._rounded(max(count, *map(len, dense)))
            even = [even_fit(taken[rows], costs[rows], limit, count) for rows in ranks]
            even = [e or without_empty(d, costs[rows], count) for rows, e, d in zip(ranks, even, dense, strict=True)]
        return [_of(rows, parts) for rows, parts in zip(ranks, even, strict=True)]

    def _rounded(self, count: int) -> int:
        return round_up(count, self.count_multiple)

    def _fewest(self, tokens: np.ndarray, ranks: list[np.ndarray]) -> int:
        """The smallest number of micro-batches that can do, at least one."""
        if self.max_tokens is None:
            return max(-(-max(len(rows) for rows in ranks) // self.micro_batch_size), 1)
        return max(-(-int(tokens[rows].sum()) // self._limit) for rows in ranks) or 1

    def _padded_count(self, tokens: np.ndarray, ranks: list[np.ndarray]) -> int:
        """The smallest number of equally many rows, the longest first, that fit under the limit as rectangles."""
        count = self._rounded(self._fewest(tokens, ranks))
        falling = [-np.sort(-tokens[rows]) for rows in ranks]
        while self.max_tokens is not None and not all(self._rectangles_fit(each, count) for each in falling):
            count += self.count_multiple
        return count

    def _rectangles_fit(self, falling: np.ndarray, count: int) -> bool:
        size, larger = divmod(len(falling), count)
        sizes = np.full(count, size) + (np.arange(count) < larger)
        sizes = sizes[sizes > 0]
        longest = round_up_all(falling[np.cumsum(sizes) - sizes], self.shape.total_multiple)
        return bool((sizes * longest <= self._limit).all())

    def _check_longest(self, lengths: RowLengths) -> None:
        taken = self._taken(lengths)
        longest = int(taken.argmax())
        if round_up(int(taken[longest]), self.shape.total_multiple) > self._limit:
            raise DataError(
                f"row {longest} of the batch has {int(lengths.tokens[longest])} tokens, more than a micro-batch may "
                f"hold ({self._limit}: ppo_max_token_len_per_gpu or log_prob_max_token_len_per_gpu of the actor, or "
                "the limit of its teacher or critic, times context_parallel_size); raise that limit"
            )

    @property
    def _limit(self) -> int:
        """Tokens of a micro-batch over all ranks of its context-parallel group."""
        return (self.max_tokens or 0) * self.shape.context

    def load(self, lengths: RowLengths, shares: Shares) -> MiniBatchLoad:
        """How a mini-batch of rows, cut into `shares`, lies on the ranks."""
        tokens = tuple(int(lengths.tokens[rows].sum()) for rows in trained_rows(shares))
        micros = [micro.rows for rank in shares for micro in rank if not micro.is_filler]
        packed = None
        if self.shape.packed:
            packed = len(lengths.sequences) / len(micros)
        fullest = max(self._computed(lengths, rows) for rows in micros)
        budget = None
        if self.max_tokens is not None:
            budget = fullest / self._limit
        return MiniBatchLoad(
            self.padding_share(lengths, shares), self.imbalance(lengths, shares), tokens, packed, budget
        )

    def _computed(self, lengths: RowLengths, rows: np.ndarray) -> int:
        """Tokens computed for a micro-batch of these rows, over all context-parallel ranks."""
        return self.shape.tokens(lengths.rows(rows).sequences)

    def padding_share(self, lengths: RowLengths, shares: Shares) -> float:
        """The share of padding in the tokens that all ranks compute: alignment, and what fillers repeat."""
        computed = sum(self._computed(lengths, micro.rows) for rank in shares for micro in rank)
        return 1.0 - float(lengths.sequences.sum()) / computed

    def imbalance(self, lengths: RowLengths, shares: Shares) -> float:
        """How much more than the mean the costliest data-parallel rank computes, as a share of the mean."""
        return imbalance(self.costs(lengths), trained_rows(shares))


def _of(rows: np.ndarray, parts: list[np.ndarray]) -> list[np.ndarray]:
    return [rows[part] for part in parts]


def _falling(tokens: np.ndarray, parts: list[np.ndarray]) -> list[np.ndarray]:
    """The one with most tokens first."""
    return sorted(parts, key=lambda part: -int(tokens[part].sum()))


def round_up_all(numbers: np.ndarray, multiple: int) -> np.ndarray:
    """int64: each number as mrl.units.round_up has it."""
    return -(-numbers.astype(np.int64) // multiple) * multiple


def trained_rows(shares: Shares) -> list[np.ndarray]:
    """Rows of each data-parallel rank, fillers left out."""
    return [rows_of(micros) for micros in shares]


def rows_of(micros: Iterable[MicroRows]) -> np.ndarray:
    """int64: the rows of these micro-batches in their order, fillers left out."""
    trained = [micro.rows for micro in micros if not micro.is_filler]
    return np.concatenate([np.zeros(0, np.int64), *trained])


def check_batch(batch: TrainBatch, model: ModelSpec, moe_layers: int) -> None:
    """Raises DataError for rows that the model cannot be asked about. `moe_layers`: with experts, of this rank."""
    if len(batch) == 0:
        raise DataError("a training batch without rows")
    if int(batch.prompt_lengths.min()) < 1:
        row = int(batch.prompt_lengths.argmin())
        raise DataError(f"row {row} of the batch has an empty prompt: nothing predicts its first response token")
    if batch.branch_counts is not None:
        _check_branches(batch)
    claimed = int(batch.lengths.sum())
    if claimed != len(batch.token_ids):
        raise DataError(f"the rows of the batch claim {claimed} tokens and it has {len(batch.token_ids)}")
    tokens = claimed if batch.route_places is None else int((batch.route_places >= 0).sum())
    expected = (tokens, moe_layers, model.num_experts_per_tok)
    if batch.routes is not None and batch.routes.shape != expected:
        raise DataError(
            f"the batch's routes are {list(batch.routes.shape)}, expected {list(expected)} (tokens, MoE layers, topk)"
        )


def _check_branches(batch: TrainBatch) -> None:
    """Raises DataError for a later branch whose first token is trained on: nothing predicts it."""
    branch_row = np.repeat(np.arange(len(batch)), batch.branch_counts)
    begins = np.cumsum(batch.response_lengths) - batch.response_lengths
    later = np.append(False, branch_row[1:] == branch_row[:-1])
    first = (begins[branch_row] + batch.branch_starts)[later]
    wrong = np.flatnonzero(batch.is_sampled[first])
    if len(wrong):
        row = int(branch_row[later][wrong[0]])
        raise DataError(f"row {row} of the batch has a branch without a prompt: nothing predicts its first token")
