"""Cuts the rows of a step into micro-batches of data-parallel replicas: once, by the driver, from lengths.

The cut of the update's first epoch decides the rows of each replica. Further epochs, log-probs and the reference are
computed on the same replica, possibly under limits of their own. So a replica needs its rows only once.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from mrl.config.schema import ActorConfig, RefConfig, RunConfig
from mrl.config.schema_distillation import TeacherConfig
from mrl.config.teacher_model import TeacherModel
from mrl.data.order import permutation
from mrl.data.row_columns import Columns, positions
from mrl.errors import DataError
from mrl.model import ModelSpec, forward_flops_per_token
from mrl.model.layout import TrainLayout
from mrl.rank.balance import balanced_parts, even_fit, first_fit, imbalance, sequence_costs, without_empty
from mrl.rank.packing import Shape, computed_tokens
from mrl.units import round_up

_OF_EPOCHS = 2  # last word of their key: a key is as if zeros followed, so it would else be one of the data's order
_CLOSE = 1.001  # relative to the mean: costs of one rank's micro-batches need not be closer


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


@dataclass(frozen=True)
class MiniBatchLoad:
    """The spread of one mini-batch over the data-parallel ranks. Every rank has the figures of all ranks."""

    padding_share: float  # padding in the tokens that all ranks compute: alignment, and rows that fillers repeat
    imbalance: float  # cost of the costliest rank over the mean cost, less 1
    tokens: tuple[int, ...]  # trained by each rank, without fillers
    packed_sequences: float | None = None  # mean number in a pack; None if sequences are padded
    budget_share: float | None = None  # the fullest micro-batch's share of the token budget; None without a budget


@dataclass(frozen=True)
class MicroRows:
    """Rows that share one forward. A filler only keeps ranks in step, and none of its rows counts: with expert
    parallelism each forward is a collective over all data-parallel ranks, so they need equally many.
    """

    rows: np.ndarray  # int64, indices into the batch
    is_filler: bool = False


Micros = tuple[MicroRows, ...]
Shares = tuple[Micros, ...]  # [data-parallel rank][micro-batch]


@dataclass(frozen=True)
class ReplicaCut:
    """The part of a step that one data-parallel replica computes. Row numbers are those of the batch that it holds.

    A critic's pass for values, and a teacher's pass, have the place of log-probs.
    """

    mini_batches: tuple[Micros, ...]  # of all epochs
    log_probs: Micros
    reference: Micros

    def trained_rows(self) -> list[np.ndarray]:
        """Returns this replica's rows of each mini-batch, int64."""
        return [np.sort(rows_of(micros)) for micros in self.mini_batches]

    def computed(self, lengths: RowLengths, shape: Shape, context_rank: int, tensor_rank: int) -> np.ndarray:
        """Returns which tokens of a batch one of the replica's ranks computes in any pass, bool [tokens]."""
        micros = {tuple(micro.rows.tolist()) for micro in self.micros}
        computed = np.zeros(int(lengths.sequences.sum()), bool)
        for rows in micros:
            indices = lengths.indices(np.array(rows))
            computed[computed_tokens(lengths.sequences, indices, shape, context_rank, tensor_rank)] = True
        return computed

    def renumbered(self, rows: np.ndarray) -> "ReplicaCut":
        """Returns the cut for a batch of `rows` [own], which are ascending row numbers of this cut's batch."""

        def local(micros: Micros) -> Micros:
            return tuple(MicroRows(np.searchsorted(rows, micro.rows), micro.is_filler) for micro in micros)

        return ReplicaCut(tuple(map(local, self.mini_batches)), local(self.log_probs), local(self.reference))

    @property
    def micros(self) -> Micros:
        """Returns the micro-batches of all passes."""
        return tuple(chain.from_iterable((*self.mini_batches, self.log_probs, self.reference)))


@dataclass(frozen=True)
class StepCut:
    """The cut of a whole step. Row numbers are the step's."""

    mini_batches: tuple[Shares, ...]  # of all epochs
    log_probs: Shares
    reference: Shares
    rows: tuple[np.ndarray, ...]  # int64, ascending: rows of each mini-batch
    loads: tuple[MiniBatchLoad, ...]
    epochs: int  # passes over all rows, each in equally many mini-batches

    def of(self, replica: int) -> ReplicaCut:
        """Returns the part of one replica."""
        return ReplicaCut(
            tuple(shares[replica] for shares in self.mini_batches), self.log_probs[replica], self.reference[replica]
        )

    def own_rows(self, replica: int) -> np.ndarray:
        """Returns the rows that the replica trains on, int64, ascending."""
        return np.unique(np.concatenate(self.of(replica).trained_rows()))

    def needed_rows(self, replica: int) -> np.ndarray:
        """Returns the replica's own rows and those that fillers repeat, int64, ascending."""
        return np.unique(np.concatenate([micro.rows for micro in self.of(replica).micros]))


def step_cut(
    config: RunConfig,
    layout: TrainLayout,
    model: ModelSpec,
    lengths: RowLengths,
    given: Sequence[np.ndarray] | None = None,
    *,
    step: int,
) -> StepCut:
    """Cuts a step's rows, which have rollout.n rows for each prompt. `step` is its number, for drawn mini-batches.

    With RunConfig.of_critic it returns a critic's cut, in which value passes take the place of log-prob passes. `given`
    holds ascending int64 rows of each replica; without it, rows are dealt anew. Raises DataError for a row above the
    limit of a micro-batch.
    """
    actor = config.actor
    update = Splitter.for_update(actor, layout, model)
    rows = mini_batch_rows(actor, config.rollout.n, len(lengths), (config.trainer.seed, step))
    of_rows = [lengths.rows(each) for each in rows]
    per_epoch = len(rows) // actor.ppo_epochs
    first = [update.shares(of_rows[k], _inside(given, rows[k])) for k in range(per_epoch)]
    of_first = [trained_rows(_numbered(part, each)) for part, each in zip(first, rows, strict=False)]
    owners = [np.sort(np.concatenate(of_replica)) for of_replica in zip(*of_first, strict=True)]
    further = first * (actor.ppo_epochs - 1)
    if actor.shuffles:
        further = [update.shares(of_rows[k], _inside(owners, rows[k])) for k in range(per_epoch, len(rows))]
    parts = tuple(_numbered(part, each) for part, each in zip((*first, *further), rows, strict=True))
    own = (
        Splitter.for_log_probs(actor, layout, model),
        Splitter.for_reference(actor, config.ref, layout, model),
    )
    # Equal cuts give equal sums bit by bit, and replayed routes belong to the same micro-batches.
    as_update = _joined(parts[:per_epoch])
    passes = [as_update if splitter is None else splitter.shares(lengths, owners) for splitter in own]
    loads = tuple(update.load(each, part) for each, part in zip(of_rows, (*first, *further), strict=True))
    return StepCut(parts, *passes, rows, loads, actor.ppo_epochs)


def mini_batch_rows(actor: ActorConfig, n: int, num_rows: int, seed: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Returns the rows of each mini-batch of a step, int64, ascending, one epoch after the other.

    PPO's epochs of mini-batches over one batch (arXiv:1707.06347, algorithm 1: K epochs). In order, or drawn: then each
    epoch divides all rows anew, by `seed` and the epoch's number, whatever the layout is. verl draws the rows of each
    data-parallel rank by themselves, alike in every step. Groups have `n` rows, and a mini-batch as many rows as its
    prompts have.
    """
    order = np.arange(num_rows)
    parts = []
    for epoch in range(actor.ppo_epochs):
        if actor.shuffles:
            order = permutation((*seed, epoch, _OF_EPOCHS), num_rows)
        parts += [np.sort(order[part]) for part in mini_batches(num_rows, actor.ppo_mini_batch_size * n)]
    return tuple(parts)


def mini_batches(num_rows: int, rows_per_mini_batch: int) -> Iterator[slice]:
    """Yields consecutive slices of rows, in order. The last may be shorter."""
    for start in range(0, num_rows, rows_per_mini_batch):
        yield slice(start, min(start + rows_per_mini_batch, num_rows))


def teacher_cut(
    actor: ActorConfig, given: TeacherConfig, teacher: TeacherModel, lengths: RowLengths, own: Sequence[np.ndarray]
) -> list[tuple[np.ndarray, ReplicaCut]]:
    """Divides the rows of a step among the teacher's replicas: rows of each, int64, ascending, and their cut.

    `given` is the teacher's section, `own` are the rows of each of the actor's replicas. Where the teacher has as many
    replicas, they score the same rows. Raises DataError for a row above the limit of a micro-batch.
    """
    splitter = Splitter.for_teacher(actor, given, teacher.layout, teacher.model)
    owners = None
    if len(own) == teacher.layout.data:
        owners = list(own)
    cuts = [ReplicaCut((), micros, ()) for micros in splitter.shares(lengths, owners)]
    needed = [np.unique(np.concatenate([micro.rows for micro in cut.log_probs])) for cut in cuts]
    return [(rows, cut.renumbered(rows)) for rows, cut in zip(needed, cuts, strict=True)]


def trained_rows(shares: Shares) -> list[np.ndarray]:
    """Returns the rows of each data-parallel rank without fillers."""
    return [rows_of(micros) for micros in shares]


def rows_of(micros: Iterable[MicroRows]) -> np.ndarray:
    """Returns the rows of these micro-batches in order, without fillers, int64."""
    trained = [micro.rows for micro in micros if not micro.is_filler]
    return np.concatenate([np.zeros(0, np.int64), *trained])


def _inside(owners: Sequence[np.ndarray] | None, rows: np.ndarray) -> list[np.ndarray] | None:
    """Returns each replica's rows of a mini-batch, by their places in `rows`, which are ascending."""
    if owners is None:
        return None
    return [np.flatnonzero(np.isin(rows, own)) for own in owners]


def _joined(parts: Sequence[Shares]) -> Shares:
    """Joins the micro-batches of all mini-batches one after the other, by replica."""
    return tuple(tuple(chain.from_iterable(of_replica)) for of_replica in zip(*parts, strict=True))


def _numbered(shares: Shares, rows: np.ndarray) -> Shares:
    """Returns shares of a mini-batch with the step's numbers of its rows."""
    return tuple(tuple(MicroRows(rows[micro.rows], micro.is_filler) for micro in replica) for replica in shares)


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
