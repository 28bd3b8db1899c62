"""Which rows of a batch go through the model together, on which data-parallel rank. Pure numpy.

Every data-parallel rank gets the same number of micro-batches, because with expert parallelism each forward is a
collective over them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mrl.config.schema import ActorConfig, RefConfig
from mrl.data.batch import TrainBatch
from mrl.errors import DataError
from mrl.megatron.packing import Shape
from mrl.model import ModelSpec, forward_flops_per_token
from mrl.model.layout import TrainLayout
from mrl.units import round_up


@dataclass(frozen=True)
class MicroBatch:
    """Rows that share one forward. Of a filler, which only keeps ranks in step, nothing counts."""

    rows: np.ndarray  # int64, indices into the batch
    is_filler: bool = False


Shares = tuple[tuple[MicroBatch, ...], ...]  # [data-parallel rank][micro-batch]


@dataclass(frozen=True)
class MiniBatchLoad:
    """How one mini-batch lies on the data-parallel ranks; every rank knows it of all."""

    padding_share: float  # of the tokens that all ranks compute: alignment, and what fillers repeat
    imbalance: float  # cost of the costliest rank over the mean cost, less 1
    tokens: tuple[int, ...]  # trained by each rank, fillers left out
    packed_sequences: float | None = None  # of a row, mean; None where sequences are padded
    budget_share: float | None = None  # of the token budget that the fullest micro-batch takes; None without one


@dataclass(frozen=True)
class UpdateResult:
    """What an update of several mini-batches hands to the driver, from one rank or from all of them.

    `parts`: metrics that add up over mini-batches and ranks, name -> (sum of value x weight, sum of weight).
    `loads`: one a mini-batch, from a single rank; the others have none.
    """

    parts: list[dict[str, tuple[float, float]]]
    loads: list[MiniBatchLoad]


def mini_batches(num_rows: int, rows_per_mini_batch: int) -> Iterator[slice]:
    """Consecutive slices of rows, in order; the last may be shorter."""
    for start in range(0, num_rows, rows_per_mini_batch):
        yield slice(start, min(start + rows_per_mini_batch, num_rows))


@dataclass(frozen=True)
class Splitter:
    """How batches are cut: the degrees that matter, one of the two limits of a micro-batch, and what a sequence costs."""

    shape: Shape
    data_parallel: int
    micro_batch_size: int  # samples; used when max_tokens is None
    max_tokens: int | None = None  # tokens of one device in a micro-batch, alignment included
    count_multiple: int = 1  # the interleaved pipeline schedule needs a multiple of its stages
    per_token: float = 1.0  # see `sequence_costs`
    per_pair: float = 0.0

    @classmethod
    def for_update(cls, actor: ActorConfig, layout: TrainLayout, model: ModelSpec) -> "Splitter":
        """Of the update's forward-backward passes."""
        return cls._of(actor, layout, model, actor.ppo_micro_batch_size_per_gpu, actor.ppo_max_token_len_per_gpu)

    @classmethod
    def for_log_probs(cls, actor: ActorConfig, layout: TrainLayout, model: ModelSpec) -> "Splitter | None":
        """Of the old policy's forward-only passes; None when they have no limit of their own and are to be cut as the update is."""
        samples, tokens = actor.log_prob_micro_batch_size_per_gpu, actor.log_prob_max_token_len_per_gpu
        if (tokens if actor.use_dynamic_bsz else samples) is None:
            return None
        return cls._of(actor, layout, model, samples or actor.ppo_micro_batch_size_per_gpu, tokens)

    @classmethod
    def for_reference(cls, actor: ActorConfig, ref: RefConfig, layout: TrainLayout, model: ModelSpec) -> "Splitter | None":
        """The same of the reference model, which has the actor's limits where it has none of its own.

        Where it is cut by tokens and the actor by samples, or the other way round, the update's cut cannot be its own:
        it then has the update's limit of its own kind.
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
        return cls._of(own, layout, model, samples, own.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu)

    @classmethod
    def _of(cls, actor: ActorConfig, layout: TrainLayout, model: ModelSpec, samples: int, tokens: int | None) -> "Splitter":
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

    def shares(self, lengths: np.ndarray, owners: list[np.ndarray] | None = None) -> Shares:
        """Every row is in exactly one micro-batch that is no filler. `lengths` [rows] are tokens per row.

        Where `owners` does not say whose each row is, rows are dealt over ranks in equal numbers and at equal cost; so are a
        rank's rows over its micro-batches where sequences are packed, and rows of like length go together where they are
        padded. The largest forward comes first. Raises DataError for a row above the limit.
        """
        costs = sequence_costs(lengths, self.per_token, self.per_pair)
        ranks = balanced_parts(costs, self.data_parallel) if owners is None else owners
        count = self._first_count(lengths, ranks)
        while True:
            count = round_up(count, self.count_multiple)
            cut = [self._cut(lengths, costs, rows, count) for rows in ranks]
            if self._fits(lengths, cut):
                break
            count += 1
        filler = MicroBatch(np.array([int(lengths.argmin())]), is_filler=True)
        return tuple(tuple(MicroBatch(rows) if len(rows) else filler for rows in rank) for rank in cut)

    def _first_count(self, lengths: np.ndarray, ranks: list[np.ndarray]) -> int:
        """The smallest number of micro-batches that can do."""
        if self.max_tokens is None:
            return max(-(-max(len(rows) for rows in ranks) // self.micro_batch_size), 1)
        longest = int(lengths.argmax())
        if self.shape.tokens(lengths[longest : longest + 1]) > self._limit:
            raise DataError(
                f"row {longest} of the batch has {int(lengths[longest])} tokens, more than a micro-batch may hold ({self._limit}: "
                "actor.ppo_max_token_len_per_gpu or log_prob_max_token_len_per_gpu times context_parallel_size); raise that limit"
            )
        return max(-(-int(lengths[rows].sum()) // self._limit) for rows in ranks) or 1

    @property
    def _limit(self) -> int:
        """Tokens of a micro-batch over all ranks of its context-parallel group."""
        return (self.max_tokens or 0) * self.shape.context

    def _cut(self, lengths: np.ndarray, costs: np.ndarray, rows: np.ndarray, count: int) -> list[np.ndarray]:
        if self.shape.packed:
            parts = [rows[part] for part in balanced_parts(costs[rows], count)]
        else:
            parts = np.array_split(rows[np.argsort(-lengths[rows], kind="stable")], count)
        return sorted(parts, key=lambda part: -int(lengths[part].sum()))

    def _fits(self, lengths: np.ndarray, cut: list[list[np.ndarray]]) -> bool:
        return self.max_tokens is None or all(self.shape.tokens(lengths[part]) <= self._limit for rank in cut for part in rank if len(part))

    def load(self, lengths: np.ndarray, shares: Shares) -> MiniBatchLoad:
        """How a mini-batch of rows of `lengths` [rows] tokens, cut into `shares`, lies on the ranks."""
        tokens = tuple(int(lengths[rows].sum()) for rows in trained_rows(shares))
        micros = [micro.rows for rank in shares for micro in rank if not micro.is_filler]
        packed = len(lengths) / len(micros) if self.shape.packed else None
        fullest = max(self.shape.tokens(lengths[rows]) for rows in micros)
        budget = fullest / self._limit if self.max_tokens is not None else None
        return MiniBatchLoad(self.padding_share(lengths, shares), self.imbalance(lengths, shares), tokens, packed, budget)

    def padding_share(self, lengths: np.ndarray, shares: Shares) -> float:
        """Of the tokens that all ranks compute, the share that is padding: alignment, and what fillers repeat."""
        computed = sum(self.shape.tokens(lengths[micro.rows]) for rank in shares for micro in rank)
        return 1.0 - float(lengths.sum()) / computed

    def imbalance(self, lengths: np.ndarray, shares: Shares) -> float:
        """How much more than the mean the costliest data-parallel rank computes, as a share of the mean."""
        return imbalance(sequence_costs(lengths, self.per_token, self.per_pair), trained_rows(shares))


def trained_rows(shares: Shares) -> list[np.ndarray]:
    """Rows of each data-parallel rank, fillers left out."""
    kept = [[micro.rows for micro in rank if not micro.is_filler] for rank in shares]
    return [np.concatenate(rows) if rows else np.zeros(0, np.int64) for rows in kept]


def check_batch(batch: TrainBatch, model: ModelSpec) -> None:
    """Raises DataError for rows that the model cannot be asked about."""
    if len(batch) == 0:
        raise DataError("a training batch without rows")
    if int(batch.prompt_lengths.min()) < 1:
        row = int(batch.prompt_lengths.argmin())
        raise DataError(f"row {row} of the batch has an empty prompt: nothing predicts its first response token")
    claimed = int(batch.lengths.sum())
    if claimed != len(batch.token_ids):
        raise DataError(f"the rows of the batch claim {claimed} tokens and it has {len(batch.token_ids)}")
    expected = (claimed, len(model.moe_layers), model.num_experts_per_tok)
    if batch.routes is not None and batch.routes.shape != expected:
        raise DataError(f"the batch's routes are {list(batch.routes.shape)}, expected {list(expected)} (tokens, MoE layers, topk)")


# ---------------------------------------------------------------- parts of equal cost


_SWAPS_PER_PART = 64


def sequence_costs(lengths: np.ndarray, per_token: float, per_pair: float) -> np.ndarray:
    """Cost of each sequence, float64 [rows]: `per_token` for each of its tokens and `per_pair` for each pair that attention compares.

    A token attends to itself and what stands before it, so a sequence of n tokens has n (n + 1) / 2 pairs.
    """
    n = lengths.astype(np.float64)
    return per_token * n + per_pair * n * (n + 1) / 2


def balanced_parts(costs: np.ndarray, parts: int) -> list[np.ndarray]:
    """Row numbers of each part, ascending. Counts differ by at most one, so with fewer rows than parts some are empty.

    Rows are dealt by falling cost, back and forth; then the heaviest part exchanges a row with a lighter one as long as that lightens it.
    """
    order = np.argsort(-costs, kind="stable")
    rounds = [order[i : i + parts] for i in range(0, len(order), parts)]
    deal: list[list[int]] = [[] for _ in range(parts)]
    for number, rows in enumerate(rounds):
        for part, row in zip(range(parts) if number % 2 == 0 else range(parts - 1, -1, -1), rows, strict=False):
            deal[part].append(int(row))
    members = [np.array(rows, dtype=np.int64) for rows in deal]
    sums = np.array([costs[rows].sum() for rows in members])
    for _ in range(_SWAPS_PER_PART * parts):
        if not _lighten_heaviest(costs, members, sums):
            break
    return [np.sort(rows) for rows in members]


def _lighten_heaviest(costs: np.ndarray, members: list[np.ndarray], sums: np.ndarray) -> bool:
    """One exchange between the heaviest part and the lightest that offers one; False when none does. Changes `members` and `sums`."""
    heavy = int(sums.argmax())
    for light in map(int, np.argsort(sums, kind="stable")):
        gap = sums[heavy] - sums[light]
        if light == heavy or not len(members[light]):
            continue
        gain = costs[members[heavy]][:, None] - costs[members[light]][None]
        useful = np.where((gain > 0) & (gain < gap), np.abs(gain - gap / 2), np.inf)
        i, j = np.unravel_index(useful.argmin(), useful.shape)
        if np.isfinite(useful[i, j]) and gain[i, j] > 1e-9 * sums[heavy]:
            members[heavy][i], members[light][j] = members[light][j], members[heavy][i]
            sums[heavy] -= gain[i, j]
            sums[light] += gain[i, j]
            return True
    return False


def imbalance(costs: np.ndarray, parts: list[np.ndarray]) -> float:
    """How much more than the mean the heaviest part costs, as a share of the mean."""
    sums = np.array([costs[rows].sum() for rows in parts])
    return float(sums.max() / sums.mean() - 1.0)
