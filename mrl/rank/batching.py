"""Decides which rows of a batch go through the model together, and on which data-parallel rank. Pure numpy.

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
from mrl.model import ModelSpec, forward_flops_per_token
from mrl.model.layout import TrainLayout
from mrl.rank.balance import balanced_parts, even_fit, first_fit, imbalance, sequence_costs, without_empty
from mrl.rank.packing import Shape
from mrl.units import round_up


@dataclass(frozen=True)
class MicroRows:
    """Rows that share one forward. A filler only keeps ranks in step, and none of its rows counts."""

    rows: np.ndarray  # int64, indices into the batch
    is_filler: bool = False


@dataclass(frozen=True)
class RowLengths:
    """Lengths of the sequences that the model computes for rows: one for each row, or one for each branch of a row.

    A micro-batch has all sequences of a row. Each is padded separately and attends only to itself.
    """

    sequences: np.ndarray  # int64 [sequences], rows end to end
    counts: np.ndarray | None = None  # int64 [rows]: number of sequences of each row, at least 1; None: 1 each

    @classmethod
    def of(cls, rows: Columns) -> "RowLengths":
        """Returns the lengths of rows with or without branches."""
        if rows.branch_counts is None:
            return cls(rows.lengths)
        return cls(rows.sequence_lengths, rows.branch_counts.astype(np.int64))

    def __len__(self) -> int:
        if self.counts is None:
            return len(self.sequences)
        return len(self.counts)

    @cached_property
    def tokens(self) -> np.ndarray:
        """Returns the tokens of each row without padding, int64 [rows]."""
        return self.summed(self.sequences)

    def summed(self, values: np.ndarray) -> np.ndarray:
        """Returns the sum of each row's `values` [sequences], as [rows]."""
        if self.counts is None:
            return values
        return np.add.reduceat(values, np.cumsum(self.counts) - self.counts)

    def indices(self, rows: np.ndarray) -> np.ndarray:
        """Returns int64 indices of the sequences that belong to `rows`, which are row numbers."""
        if self.counts is None:
            return rows
        return positions(self.counts, rows)

    def rows(self, rows: np.ndarray) -> "RowLengths":
        """Returns the lengths of the given rows only."""
        counts = None
        if self.counts is not None:
            counts = self.counts[rows]
        return RowLengths(self.sequences[self.indices(rows)], counts)


_CLOSE = 1.001  # relative to the mean: costs of one rank's micro-batches need not be closer

Shares = tuple[tuple[MicroRows, ...], ...]  # [data-parallel rank][micro-batch]


@dataclass(frozen=True)
class MiniBatchLoad:
    """The spread of one mini-batch over the data-parallel ranks. Every rank has the figures of all ranks."""

    padding_share: float  # padding in the tokens that all ranks compute: alignment, and rows that fillers repeat
    imbalance: float  # cost of the costliest rank over the mean cost, less 1
    tokens: tuple[int, ...]  # trained by each rank, without fillers
    packed_sequences: float | None = None  # mean number in a pack; None if sequences are padded
    budget_share: float | None = None  # the fullest micro-batch's share of the token budget; None without a budget


@dataclass(frozen=True)
class RowResult:
    """Log-probabilities of the rows of a batch that one data-parallel replica computed."""

    rows: np.ndarray  # int64 [rows]: row numbers in the batch
    log_probs: np.ndarray  # float32 [sampled tokens of these rows], rows end to end
    entropy: tuple[float, float]  # (sum over sampled tokens in nats, number of tokens)
    # from a teacher, [sampled tokens of these rows, k]: its likeliest tokens, int32, and their log-probs, float32
    top_ids: np.ndarray | None = None
    top_log_probs: np.ndarray | None = None


@dataclass(frozen=True)
class UpdateResult:
    """The result of an update of several mini-batches for the driver, from one rank or joined over all ranks.

    `parts`: metrics that add up over mini-batches and ranks, name -> (sum of value x weight, sum of weight). `loads`:
    one for each mini-batch, from a single rank; empty on the others. `old`: with an on-policy anchor, log-probs of the
    rows before the update, from ranks of the last pipeline stage. `spent`: time and peaks of memory on this rank, which
    differ between updates.
    """

    parts: list[dict[str, tuple[float, float]]]
    loads: list[MiniBatchLoad]
    old: RowResult | None = None
    spent: dict[str, tuple[float, float]] = field(default_factory=dict, compare=False)


def mini_batches(num_rows: int, rows_per_mini_batch: int) -> Iterator[slice]:
    """Yields consecutive slices of rows, in order. The last may be shorter."""
    for start in range(0, num_rows, rows_per_mini_batch):
        yield slice(start, min(start + rows_per_mini_batch, num_rows))


@dataclass(frozen=True)
class Splitter:
    """Cuts batches into micro-batches.

    It has the relevant parallel degrees, one of the two limits of a micro-batch, and the cost of a sequence.
    """

    shape: Shape
    data_parallel: int
    micro_batch_size: int  # samples; used when max_tokens is None
    max_tokens: int | None = None  # tokens of one device in a micro-batch, with alignment
    count_multiple: int = 1  # the interleaved pipeline schedule needs a multiple of its stages
    per_token: float = 1.0  # as in `sequence_costs`
    per_pair: float = 0.0

    @classmethod
    def for_update(cls, actor: ActorConfig, layout: TrainLayout, model: ModelSpec) -> "Splitter":
        """Splits rows for the update's forward-backward passes."""
        return cls._of(actor, layout, model, actor.ppo_micro_batch_size_per_gpu, actor.ppo_max_token_len_per_gpu)

    @classmethod
    def for_log_probs(cls, actor: ActorConfig, layout: TrainLayout, model: ModelSpec) -> "Splitter | None":
        """Splits rows for the old policy's forward-only passes.

        Returns None if these passes have no limit of their own and are cut like the update.
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
        """Splits rows for the reference model, which uses the actor's limits if it has none of its own.

        If one of the two is cut by tokens and the other by samples, they cannot share a cut. Then the reference uses
        the update's limit of the reference's own kind.
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
        """Splits rows for the teacher in its own layout. It uses the actor's limits if it has none of its own."""
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

        `owners` gives the rows of each rank. Without it, rows are dealt over ranks in equal numbers and at equal cost.
        Packed sequences are dealt over a rank's micro-batches in the same way. For padded ones, rows of similar length
        go together. The largest forward comes first. Raises DataError for a row above the limit.
        """
        costs = self.costs(lengths)
        ranks = balanced_parts(costs, self.data_parallel) if owners is None else owners
        cut = self._cut(lengths, costs, ranks)
        tokens = lengths.tokens
        filler = MicroRows(np.array([int(tokens.argmin())]), is_filler=True)
        return tuple(tuple(MicroRows(rows) if len(rows) else filler for rows in _falling(tokens, rank)) for rank in cut)

    def costs(self, lengths: RowLengths) -> np.ndarray:
        """Returns the cost of computing the sequences of each row, float64 [rows]."""
        return lengths.summed(sequence_costs(lengths.sequences, self.per_token, self.per_pair))

    def _padded_tokens(self, lengths: RowLengths) -> np.ndarray:
        """Returns the tokens of each row in a pack with every sequence padded, int64 [rows]."""
        return lengths.summed(round_up_all(lengths.sequences, self.shape.sequence_multiple))

    def _cut(self, lengths: RowLengths, costs: np.ndarray, ranks: list[np.ndarray]) -> list[list[np.ndarray]]:
        """Returns the rows of every rank's micro-batches. All ranks have equally many."""
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

        It uses as few packs as the sum allows if rows then fit evenly, else as few as fit.
        """
        limit = self._limit // self.shape.total_multiple * self.shape.total_multiple
        padded = self._padded_tokens(lengths)
        count = self._rounded(self._fewest(lengths.tokens, ranks))
        even = [even_fit(padded[rows], costs[rows], limit, count) for rows in ranks]
        if any(parts is None for parts in even):
            dense = [first_fit(padded[rows], limit) for rows in ranks]
            count = self._rounded(max(count, *map(len, dense)))
            even = [even_fit(padded[rows], costs[rows], limit, count) for rows in ranks]
            even = [e or without_empty(d, costs[rows], count) for rows, e, d in zip(ranks, even, dense, strict=True)]
        return [_of(rows, parts) for rows, parts in zip(ranks, even, strict=True)]

    def _rounded(self, count: int) -> int:
        return round_up(count, self.count_multiple)

    def _fewest(self, tokens: np.ndarray, ranks: list[np.ndarray]) -> int:
        """Returns a lower bound of the number of micro-batches, at least one."""
        if self.max_tokens is None:
            return max(-(-max(len(rows) for rows in ranks) // self.micro_batch_size), 1)
        return max(-(-int(tokens[rows].sum()) // self._limit) for rows in ranks) or 1

    def _padded_count(self, tokens: np.ndarray, ranks: list[np.ndarray]) -> int:
        """Returns the smallest number of padded micro-batches, with equally many rows, the longest first, that stay
        under the limit.
        """
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
        padded = self._padded_tokens(lengths)
        longest = int(padded.argmax())
        if round_up(int(padded[longest]), self.shape.total_multiple) > self._limit:
            raise DataError(
                f"row {longest + 1} of the batch has {int(lengths.tokens[longest])} tokens, more than a micro-batch "
                f"may hold ({self._limit}: ppo_max_token_len_per_gpu or log_prob_max_token_len_per_gpu of the actor, "
                "or the limit of its teacher or critic, times context_parallel_size); raise that limit"
            )

    @property
    def _limit(self) -> int:
        """Returns the token limit of a micro-batch over all ranks of its context-parallel group."""
        return (self.max_tokens or 0) * self.shape.context

    def load(self, lengths: RowLengths, shares: Shares) -> MiniBatchLoad:
        """Returns how a mini-batch, cut into `shares`, is spread over the ranks."""
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
        """Returns the tokens computed for a micro-batch of these rows, over all context-parallel ranks."""
        return self.shape.tokens(lengths.rows(rows).sequences)

    def padding_share(self, lengths: RowLengths, shares: Shares) -> float:
        """Returns padding's share of the tokens that all ranks compute: alignment, and rows that fillers repeat."""
        computed = sum(self._computed(lengths, micro.rows) for rank in shares for micro in rank)
        return 1.0 - float(lengths.sequences.sum()) / computed

    def imbalance(self, lengths: RowLengths, shares: Shares) -> float:
        """Returns how much more than the mean the costliest data-parallel rank computes, as a share of the mean."""
        return imbalance(self.costs(lengths), trained_rows(shares))


def _of(rows: np.ndarray, parts: list[np.ndarray]) -> list[np.ndarray]:
    return [rows[part] for part in parts]


def _falling(tokens: np.ndarray, parts: list[np.ndarray]) -> list[np.ndarray]:
    """Sorts the parts by falling number of tokens."""
    return sorted(parts, key=lambda part: -int(tokens[part].sum()))


def round_up_all(numbers: np.ndarray, multiple: int) -> np.ndarray:
    """Rounds each number up as mrl.units.round_up does, int64."""
    return -(-numbers.astype(np.int64) // multiple) * multiple


def trained_rows(shares: Shares) -> list[np.ndarray]:
    """Returns the rows of each data-parallel rank without fillers."""
    return [rows_of(micros) for micros in shares]


def rows_of(micros: Iterable[MicroRows]) -> np.ndarray:
    """Returns the rows of these micro-batches in order, without fillers, int64."""
    trained = [micro.rows for micro in micros if not micro.is_filler]
    return np.concatenate([np.zeros(0, np.int64), *trained])


def check_batch(batch: TrainBatch, model: ModelSpec, moe_layers: int) -> None:
    """Raises DataError for rows that the model cannot compute.

    `moe_layers`: number of this rank's layers with experts.
    """
    if len(batch) == 0:
        raise DataError("a training batch without rows")
    if int(batch.prompt_lengths.min()) < 1:
        row = int(batch.prompt_lengths.argmin()) + 1
        raise DataError(f"row {row} of the batch has an empty prompt: nothing predicts its first response token")
    if batch.image_counts is not None and batch.positions is None:
        raise DataError("rows have images, and the model was loaded without its vision tower: it would not see them")
    if batch.branch_counts is not None:
        _check_branches(batch)
    claimed = int(batch.lengths.sum())
    if claimed != len(batch.token_ids):
        raise DataError(f"the rows of the batch claim {claimed} tokens and it has {len(batch.token_ids)}")
    tokens = claimed if batch.route_rows is None else int((batch.route_rows >= 0).sum())
    expected = (tokens, moe_layers, model.num_experts_per_tok)
    if batch.routes is not None and batch.routes.shape != expected:
        raise DataError(
            f"the batch's routes are {list(batch.routes.shape)}, expected {list(expected)} (tokens, MoE layers, topk)"
        )


def _check_branches(batch: TrainBatch) -> None:
    """Raises DataError if the first token of a later branch is trained on: no token predicts it."""
    branch_row = np.repeat(np.arange(len(batch)), batch.branch_counts)
    begins = np.cumsum(batch.response_lengths) - batch.response_lengths
    later = np.append(False, branch_row[1:] == branch_row[:-1])
    first = (begins[branch_row] + batch.branch_starts)[later]
    wrong = np.flatnonzero(batch.is_sampled[first])
    if len(wrong):
        row = int(branch_row[later][wrong[0]]) + 1
        raise DataError(f"row {row} of the batch has a branch without a prompt: nothing predicts its first token")
