"""One rank's process of a replay: `python -m mrl.driver.replay_rank RANK PORT FOLDER`.

`FOLDER/order.json` says what to compute (mrl.tools.explain.replay). All ranks read the same samples and cut them alike,
so nothing is handed between them but what a step's own collectives carry, metrics, and whether there is time for more.
Each writes `FOLDER/rank-R.json`.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mrl.config.deployment import image_store
from mrl.config.load import load_config
from mrl.config.schema import RunConfig, with_values
from mrl.config.schema_actor import OPTIMIZER, PARAMETERS
from mrl.driver.replay_views import KEPT, SHOWN_ROWS, Weights, compared_views, fitting, viewed, weights_of
from mrl.driver.step_batch import StepBatch, gradient_norms
from mrl.driver.stored_step import stored_rollouts
from mrl.generate.rollouts import Rollouts, compared, metric_values
from mrl.platforms import prepare_process
from mrl.platforms.hosting import set_communicator_defaults, set_rank_defaults
from mrl.rank.rank_step import RankStep
from mrl.record.metrics import reduce_parts

Difference = tuple[str, Any, Any]  # name of a metric, the run's value, the one of now

_RATES = ("max_lr", "min_lr")  # that Megatron's scheduler reads of a group of parameters


class OwnRank:
    """All ranks, as StepBatch asks them: this process answers for its own, and takes its answer for the others'."""

    teacher = None
    critic_layout = None

    def __init__(self, actor: Any):
        self._actor = actor
        self.route_readers: dict[str, Any] = {}
        self.config = actor.config
        self.model = actor.model
        self.layout = actor.layout
        self._step: RankStep | None = None

    @property
    def row_gaps(self) -> tuple[np.ndarray, np.ndarray]:
        """Sum of absolute differences of log-probs from generation's, and tokens, of all rows of the newest step;
        float64 and int64 [rows].
        """
        gaps = self._step.gaps
        return gaps["log_gap"], gaps["tokens"]

    def score(self, arguments: Sequence[Sequence[Any]]) -> tuple[list[Any], list[Any]]:
        rows, own, samples, *handed = arguments[self._actor.rank]
        self._step = RankStep(self._actor, rows)
        scored, returns = self._step.score(own, samples, handed)
        return [scored] * len(arguments), [returns] * len(arguments)

    def shown(self, rows: np.ndarray) -> np.ndarray | None:
        """Returns this rank's log-probs of the tokens of those of `rows` that it answers for; None: of none."""
        return self._step.shown(rows, False)

    def each(self, method: str, arguments: Sequence[Sequence[Any]], phase: str) -> list[Any]:
        return [getattr(self._step, method)(*arguments[self._actor.rank])] * len(arguments)


class Snapshot:
    """Weights, optimizer and random states of a rank, to return to before each experiment."""

    def __init__(self, actor: Any):
        import torch

        from mrl.rank.rank_parameters import MOMENTS, rank_parameters

        self._actor = actor
        self._of = []
        with torch.no_grad(), actor.residence.using(PARAMETERS, OPTIMIZER):
            for each in rank_parameters(actor):
                kept = {"parameter": each.parameter.detach().clone()}
                if each.optimizer is not None:
                    main = each.main()
                    moments = each.adam.moments(main)
                    kept |= {"main": main.detach().clone(), "master": each.adam.master(main).detach().clone()}
                    kept["moments"] = {name: moments[name].clone() for name in MOMENTS.values() if name in moments}
                    kept["steps"] = each.adam.steps()
                self._of.append((each, kept))
        self._num_steps = actor.scheduler.num_steps
        self.rates = {name: actor.optimizer.param_groups[0][name] for name in _RATES}
        self._counts = actor.num_updates, actor.skipped_in_a_row
        self._random = torch.get_rng_state()

    def restore(self, fresh_optimizer: bool = False, lost_moments: bool = False) -> None:
        """Returns to the state. `fresh_optimizer`: with moments as before a first update; `lost_moments`: with none,
        but the count of updates.
        """
        import torch

        with torch.no_grad(), self._actor.residence.using(PARAMETERS, OPTIMIZER):
            for each, kept in self._of:
                each.parameter.data.copy_(kept["parameter"])
                if each.optimizer is None:
                    continue
                main = each.main()
                main.copy_(kept["main"])
                each.adam.master(main).copy_(kept["master"])
                moments = {name: torch.zeros_like(kept["master"]) for name in ("exp_avg", "exp_avg_sq")}
                step = 0.0
                if kept["moments"] and not fresh_optimizer:
                    moments = {name: value.clone() for name, value in kept["moments"].items()}
                    step = max(kept["steps"])
                if lost_moments:
                    moments = {name: torch.zeros_like(value) for name, value in moments.items()}
                each.adam.set_moments(main, step, moments)
        self._actor.residence.forget_copies()
        scheduler = self._actor.scheduler
        for group in self._actor.optimizer.param_groups:
            group.update(self.rates)
        scheduler.num_steps = self._num_steps
        scheduler.step(0)
        self._actor.num_updates, self._actor.skipped_in_a_row = self._counts
        torch.set_rng_state(self._random)


def built(config: RunConfig, rank: int, port: int) -> Any:
    """Builds this rank's part of the actor as ActorWorker.start does, with the model's weights."""
    layout = config.actor.layout
    cuts = layout.tensor_model_parallel_size * layout.context_parallel_size > 1
    set_communicator_defaults()
    set_rank_defaults(config.cluster.device, cuts, config.model.grouped_gemm)
    own = prepare_process(config.cluster.device, layout.model_dump(), config.model.override_transformer_config)
    config = config.model_copy(update={"model": config.model.model_copy(update={"override_transformer_config": own})})
    from mrl.rank.actor import MegatronActor

    return MegatronActor(config, rank, layout.world_size, "127.0.0.1", port)


class ReplayedStep:
    """A step on this rank: scored when it is made, then updated."""

    def __init__(
        self, actor: Any, step: int, rollouts: Rollouts, kl_coef: float | None, left_out: np.ndarray | None = None
    ) -> None:
        """`kl_coef` is the weight of a KL in the step's rewards; None: that of the configuration. `left_out`, bool
        [rows], marks rows that do not count.
        """
        config = actor.config
        algorithm = config.algorithm
        self._actor = actor
        self._ranks = OwnRank(actor)
        self._batch = StepBatch(self._ranks, rollouts.samples, step)
        counted = compared(self._batch.rows.group_id, rollouts.results, config.compares_responses)
        if left_out is not None:
            counted = counted & ~left_out
        parts = {key: metric_values(key, rollouts.results, rollouts.rewards) for key in algorithm.gdpo_reward_keys}
        self._scored = self._batch.score(rollouts.rewards, counted, parts, algorithm.needs_reference, kl_coef)

    def log_probs(self) -> dict[int, list[float]]:
        """Returns the log-probs that this rank answers for, of the rows that differ most from generation, by sample
        id. Before the update.
        """
        gap, tokens = self._ranks.row_gaps
        rows = np.sort(np.argsort(-gap / np.maximum(tokens, 1))[:SHOWN_ROWS])
        told = self._ranks.shown(rows)
        if told is None:
            return {}
        batch = self._batch
        own = batch._own_among(rows, batch._replica_of[self._actor.rank])
        parts = np.split(told, np.cumsum(batch.rows.response_lengths[own]))[:-1]
        return {number: part.tolist() for number, part in zip(batch.rows.sample_id[own].tolist(), parts, strict=True)}

    def update(self) -> dict[str, float]:
        """Updates the weights. Returns the step's metrics as the driver makes them, on all ranks."""
        calls = [()] * self._actor.layout.world_size
        answers, metrics = self._ranks.each("update", calls, "update")[0]
        return _of_all_ranks(self._actor, dict(self._scored.metrics) | metrics, answers)


def _of_all_ranks(actor: Any, metrics: Mapping[str, float], answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns a step's metrics: the first rank's `metrics`, and what all ranks say of their updates."""
    own = json.dumps([metrics, [dict(part) for part in answers]])
    told = [json.loads(data) for data in actor.gather_bytes(own.encode())]
    of_updates = [part for _, parts in told for part in parts]
    found = told[0][0] | reduce_parts(of_updates)
    applied = len(gradient_norms(of_updates)) - found.get("actor/skipped_updates", 0.0)
    return found | {"actor/updates": applied}


def unlike(stored: Mapping[str, Any], again: Mapping[str, float]) -> list[Difference]:
    """Returns the metrics that are not equal, of those that both have. What is not finite is stored as null."""
    both = [(name, stored[name], again[name]) for name in again if name in stored]
    return [each for each in both if not (each[1] == each[2] or (each[1] is None and not math.isfinite(each[2])))]


@contextmanager
def without_replica(chunks: Sequence[Any], replica: int | None) -> Iterator[None]:
    """Loses the gradients of one data-parallel replica, as if it had none.

    Each group of buckets sums its own, when its gradients are complete or at the end of the pass; the function of the
    same name of DistributedDataParallel is of schedules with a `grad_sync_func`, and not called.
    """
    from megatron.core import parallel_state as mpu

    def lost(group: Any, summed: Callable[..., None], *arguments: Any, **named: Any) -> None:
        if mpu.get_data_parallel_rank() == replica:
            for bucket in group.buckets:
                bucket.grad_data.zero_()
        summed(*arguments, **named)

    groups = [group for chunk in chunks for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]
    before = [group.start_grad_sync for group in groups]
    for group, summed in zip(groups, before, strict=True):
        group.start_grad_sync = partial(lost, group, summed)
    try:
        yield
    finally:
        for group, summed in zip(groups, before, strict=True):
            group.start_grad_sync = summed


def experiment(
    actor: Any, given: dict[str, Any], step: int, rollouts: Rollouts, start: Snapshot, kl_coef: float | None
) -> dict[str, Any]:
    """Computes a step with one thing changed: settings, numbers of the loss, rows that are left out, the optimizer's
    state, a replica's gradients, or the forward pass (mrl.driver.replay_views). Returns its metrics, or why it failed.
    """
    from mrl.rank.loss_parameters import loss_parameters

    start.restore(given.get("fresh_optimizer", False), given.get("lost_moments", False))
    usual = actor.config
    left_out = None
    if given.get("rows") is not None:
        left_out = np.zeros(len(rollouts.results), bool)
        left_out[given["rows"]] = True
    try:
        actor.config = with_values(usual, given.get("settings", {}))
        parameters = loss_parameters(actor.config.algorithm, actor.config.distillation)
        actor.loss_parameters = replace(parameters, **given.get("loss", {}))
        if "lr_times" in given:
            for group in actor.optimizer.param_groups:
                for name in _RATES:
                    group[name] = given["lr_times"] * start.rates[name]
            actor.scheduler.step(0)
        with ExitStack() as changed:
            changed.enter_context(viewed(actor, given.get("view", {"kind": "own"}), {}))
            if "lost_replica" in given:
                changed.enter_context(without_replica(actor.chunks, given["lost_replica"]))
            if "kl_coef_times" in given:
                usual_coef = usual.algorithm.kl_ctrl.kl_coef if kl_coef is None else kl_coef
                kl_coef = given["kl_coef_times"] * usual_coef
            return {"metrics": ReplayedStep(actor, step, rollouts, kl_coef, left_out).update()}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    finally:
        actor.config = usual
        actor.loss_parameters = loss_parameters(usual.algorithm, usual.distillation)


class Time:
    """Says whether there is time for more, alike on all ranks: the first one's clock counts."""

    def __init__(self, actor: Any, end: float):
        self._actor = actor
        self._begun, self._end = time.monotonic(), end

    def is_left(self, share: float) -> bool:
        """Tells whether less than a share of the time is spent. Collective."""
        spent = (time.monotonic() - self._begun) / max(self._end - self._begun, 1e-9)
        return self._actor.gather_bytes(b"1" if spent < share else b"0")[0] == b"1"


VIEWS_UNTIL, EXPERIMENTS_UNTIL = 0.6, 0.9  # shares of the time


def main(rank: int, port: int, folder: Path) -> None:
    """Computes what the order says, and writes this rank's answer.

    The first step that does not repeat is the last, if the order has guesses: they are computed in its place.
    """
    begun = time.monotonic()
    order = json.loads((folder / "order.json").read_text(encoding="utf-8"))
    run = Path(order["run"])
    config = load_config(folder / "config.yaml").config
    config = with_values(config, {"trainer.total_training_steps": order["total_steps"]} | order["settings"])
    actor = built(config, rank, port)
    older: dict[int, Weights] = {}  # by version
    if order["checkpoint"] is not None:
        from mrl.rank.rank_load import load_rank

        if order["views"]:
            older[0] = weights_of(actor)  # the model's, which engines have where a resume forgets them
        load_rank(actor, Path(order["checkpoint"]), any_dtype="model.dtype" in order["settings"])
    actor.see_images(image_store(config, run))
    clock = Time(actor, begun + order["seconds"])
    answer: dict[str, Any] = {
        "steps": {}, "differences": {}, "views": [], "experiments": {}, "file": None, "served": None, "log_probs": {}
    }  # fmt: skip
    control = config.algorithm.kl_ctrl
    kl_coef: float | None = order["kl_coef"]
    for step in range(order["first"], order["step"] + 1):
        is_last = step == order["step"]
        if order["views"] and not is_last and step > order["step"] - 1 - KEPT:
            older[step - 1] = weights_of(actor)
        rollouts = stored_rollouts(config, run / "samples", step)
        start = None  # before the next: a device holds one, beside the state itself
        start = Snapshot(actor) if is_last or order["guesses"] else None
        if order["views"] and is_last:
            answer["views"] = _views(actor, step, rollouts, older, clock, order["floor"])
            start.restore()
        is_compared = order["served"] and is_last and not fitting(answer["views"])
        if is_compared:
            answer["served"] = _weights_written(actor, Path(order["served"]))
        now = ReplayedStep(actor, step, rollouts, kl_coef)
        if is_compared:
            answer["log_probs"] = now.log_probs()
        metrics = now.update()
        answer["steps"][step] = metrics
        found = unlike(order["stored"][str(step)], metrics)
        if found:
            answer["differences"][step] = found
        if (found and order["guesses"]) or is_last:
            if is_last and order["weights"]:
                answer["file"] = _file_facts(actor)
            given = order["guesses"] if found and order["guesses"] else order["experiments"]
            answer["experiments"] = {
                each["name"]: experiment(actor, each, step, rollouts, start, kl_coef)
                if clock.is_left(EXPERIMENTS_UNTIL)
                else {"failed": "there was no time for it"}
                for each in given
            }
            break
        if control.type == "adaptive":  # as the run goes on, not as its metrics say
            kl_coef = control.next_coef(metrics["actor/kl_coef"], metrics["actor/reward_kl"], len(rollouts.results))
    (folder / f"rank-{rank}.json").write_text(json.dumps(answer), encoding="utf-8")
    actor.close()


def _views(
    actor: Any, step: int, rollouts: Rollouts, older: Mapping[int, Weights], clock: Time, floor: float
) -> list[dict[str, Any]]:
    ranks = OwnRank(actor)

    def gaps() -> tuple[np.ndarray, np.ndarray]:
        StepBatch(ranks, rollouts.samples, step).gaps()
        return ranks.row_gaps

    return compared_views(actor, older, gaps, lambda: clock.is_left(VIEWS_UNTIL), floor)


def _weights_written(actor: Any, folder: Path) -> dict[str, Any]:
    """Writes this rank's weights as a checkpoint of weights alone has them. Returns their description; of a disk that
    refuses, which costs one comparison and not the replay, `failed` with the reason.
    """
    from mrl.checkpoint.manifest import RankFiles, StoredTensor, described
    from mrl.checkpoint.open_checkpoint import weight_role
    from mrl.rank.rank_parameters import rank_parameters
    from mrl.rank.rank_save import rank_file, write_tensors

    file = rank_file(actor.rank)
    entries, tensors = [], {}
    with actor.residence.using(PARAMETERS, OPTIMIZER):
        for each in rank_parameters(actor):
            shard = each.shard
            if shard.primary == actor.rank:
                role = weight_role(shard)
                entries.append(StoredTensor(file, f"{role}/{each.key}", role, shard.local_shape, None, shard.pieces))
                tensors[entries[-1].key] = each.parameter.detach().to("cpu", copy=True).contiguous()
    nothing = {"step": None, "num_updates": 0, "lr": None, "scheduler": None}
    try:
        part = RankFiles(tuple(entries), {file: write_tensors(folder / file, tensors)}, nothing)
        return described(folder, actor.rank, part).to_json()
    except OSError as error:
        return {"failed": f"{folder / file} cannot be written: {error.strerror}"}


def _file_facts(actor: Any) -> dict[str, Any]:
    """Returns size and SHA-256 of the file that this rank would write of a checkpoint now, by its name."""
    from mrl.rank.rank_save import HostCopy

    copy = HostCopy()
    copy.take(actor)
    return copy.facts()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
