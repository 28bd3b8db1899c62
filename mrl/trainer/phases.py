"""One function a phase of the loop. Each takes the run and what the phase works on, and returns what the next one needs."""

import dataclasses

import numpy as np
import psutil

from mrl.algo.advantages import compute_advantages
from mrl.algo.mismatch import mismatch_metrics
from mrl.data.batch import Prompt, Sample, TrainBatch, collate
from mrl.data.order import DataCursor
from mrl.data.tokenizer import pad_token_id
from mrl.errors import NumericAbort
from mrl.layout import TrainLayout
from mrl.megatron.batching import Splitter, mini_batches, trained_rows
from mrl.models import load_model_spec
from mrl.record.metrics import batch_metrics, reduce_parts, reward_metrics, seqlen_metrics, speed_metrics
from mrl.record.samples import write_samples as write_samples_file
from mrl.record.timer import PhaseTimer, timing_metrics
from mrl.reward.items import RewardItem, RewardResult, check_failures, failure_counts
from mrl.rollout.settings import training_sampling, validation_sampling
from mrl.rollout.types import Completion, Request, Sampling
from mrl.trainer.run import Run
from mrl.trainer.seeds import sample_seed

BUCKET_BYTES = 512 * 1024**2
TRAIN, VALIDATION = "train", "validation"


def next_prompts(run: Run) -> tuple[list[Prompt], DataCursor]:
    """The step's prompts, and where the next step begins."""
    return run.train_prompts.next_batch(run.state.cursor)


def generate(run: Run, prompts: list[Prompt]) -> list[Sample]:
    """`rollout.n` responses a prompt, ordered by prompt; each is handed to the reward pool as it arrives."""
    return _sample(run, prompts, run.config.rollout.n, training_sampling(run.config), TRAIN, run.state.step + 1)


def _sample(run: Run, prompts: list[Prompt], n: int, sampling: Sampling, purpose: str, step: int) -> list[Sample]:
    seed = run.config.trainer.seed
    wanted = [(group, prompt, k) for group, prompt in enumerate(prompts) for k in range(n)]
    requests = [Request(i, p.token_ids, sample_seed(seed, purpose, step, p.prompt_id, k)) for i, (_, p, k) in enumerate(wanted)]

    arrived = 0

    def score(batch: list[Completion]) -> None:
        nonlocal arrived
        arrived += len(batch)
        run.record.progress(f"{purpose} responses", arrived, len(requests))
        for completion in batch:
            run.rewards.submit(_reward_item(run, wanted[completion.sample_id][1], completion))

    done = run.engines.generate(requests, sampling, score)
    return [
        Sample(
            prompt_id=prompt.prompt_id, group_id=group, sample_id=i, seed=request.seed, prompt_ids=prompt.token_ids,
            response_ids=answer.token_ids, rollout_log_probs=answer.log_probs, stop_reason=answer.stop_reason,
            weight_version=answer.weight_version,
        )
        for i, ((group, prompt, _), request, answer) in enumerate(zip(wanted, requests, done, strict=True))
    ]  # fmt: skip


def _reward_item(run: Run, prompt: Prompt, completion: Completion) -> RewardItem:
    text = run.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    return RewardItem(completion.sample_id, prompt.data_source, text, prompt.ground_truth, prompt.extra_info)


def collect_rewards(run: Run, samples: list[Sample]) -> list[RewardResult]:
    """Results in the order of `samples`. Raises DataError when too many failed."""
    share = run.config.reward.max_failure_share
    results = run.rewards.drain(run.stop.raise_if_set, int(share * len(samples)))
    check_failures(results, share)
    by_id = {result.sample_id: result for result in results}
    return [by_id[s.sample_id] for s in samples]


def with_old_log_probs(run: Run, samples: list[Sample]) -> tuple[TrainBatch, dict[str, float]]:
    """The samples as a batch, with log-probs of the same weights under Megatron's numerics; the policy's entropy, and how far apart
    generation and training are. Raises NumericAbort for log-probs that are not finite.
    """
    batch = collate(samples, run.config.rollout.temperature, pad_token_id(run.tokenizer))
    log_probs, entropy = run.actor.log_probs(batch)
    apart = mismatch_metrics(batch.rollout_log_probs, log_probs, batch.response_mask)
    return dataclasses.replace(batch, old_log_probs=log_probs), {"actor/entropy": entropy} | apart


def with_advantages(run: Run, batch: TrainBatch, samples: list[Sample], rewards: list[RewardResult]) -> TrainBatch:
    """The batch with every response's advantage on its tokens."""
    algorithm = run.config.algorithm
    groups = np.array([s.group_id for s in samples])
    advantages = compute_advantages(
        algorithm.adv_estimator, _scores(rewards), groups, batch.response_mask, algorithm.norm_adv_by_std_in_grpo
    )
    return dataclasses.replace(batch, advantages=advantages)


def update(run: Run, batch: TrainBatch) -> dict[str, float]:
    """All optimizer steps on the batch; reduced metrics. Raises NumericAbort when not one of them could be applied."""
    metrics = reduce_parts(run.actor.update(batch))
    updates = run.config.updates_per_step
    if metrics["actor/skipped_updates"] == updates:
        raise NumericAbort(
            f"step {run.state.step + 1}: the gradient norm of all {updates} updates was not finite; weights are those of the step before. "
            "Look at the samples of the step and resume with a smaller actor.optim.lr"
        )
    return metrics | {"actor/updates": updates - metrics["actor/skipped_updates"]}


def sync_weights(run: Run) -> dict[str, float]:
    """Brings every engine to the trained weights, as the version that the coming finished step has."""
    return bring_engines_to(run, run.state.step + 1)


def bring_engines_to(run: Run, version: int) -> dict[str, float]:
    """Full HF tensors from the bridge into every engine."""
    timer = PhaseTimer()
    with timer("sync"):
        moved = run.engines.update_weights(run.actor.export_buckets(BUCKET_BYTES), version)
    return {"reshard/seconds": timer.seconds["sync"], "reshard/bytes_moved": float(moved), "reshard/weight_version": float(version)}


def validate(run: Run) -> dict[str, float]:
    """Mean score on the held-out prompts, by data source; nothing without held-out prompts."""
    if run.val_prompts is None:
        return {}
    n, prompts = run.config.rollout.val_kwargs.n, list(run.val_prompts)
    samples = _sample(run, prompts, n, validation_sampling(run.config), VALIDATION, 0)
    results = collect_rewards(run, samples)
    by_source: dict[str, list[float]] = {}
    for sample, result in zip(samples, results, strict=True):
        by_source.setdefault(prompts[sample.group_id].data_source, []).append(result.score)
    return {f"val-core/{source}/reward/mean@{n}": float(np.mean(scores)) for source, scores in sorted(by_source.items())}


def due(run: Run, freq: int) -> bool:
    """Whether something done every `freq` steps is done after the step that just finished; the last step always does it."""
    return freq > 0 and (run.state.step % freq == 0 or run.state.step == run.total_steps)


def step_metrics(run: Run, batch: TrainBatch, rewards: list[RewardResult]) -> dict[str, float]:
    """What the step's samples say: lengths, scores, advantages, and how far generation is from training."""
    scores, failed = _scores(rewards), sum(failure_counts(rewards).values())
    return {
        "training/epoch": float(run.state.cursor.epoch),
        **reward_metrics(scores, scores),
        **batch_metrics(batch, run.config.data.max_prompt_length, run.config.data.max_response_length),
        **_load_metrics(run, batch),
        "train/num_gen_batches": 1.0,
        "reward/failed": float(failed),
        "reward/failure_share": failed / len(rewards),
    }


def _load_metrics(run: Run, batch: TrainBatch) -> dict[str, float]:
    """How evenly the update lies on the data-parallel ranks, and how much of it is padding; the ranks cut batches by the same rule."""
    actor, lengths = run.config.actor, batch.prompt_lengths + batch.response_lengths
    model = load_model_spec(run.config.model.path)
    splitter = Splitter.for_update(actor, TrainLayout.build(actor.layout.model_dump(), model), model)
    rows: list[list[np.ndarray]] = [[] for _ in range(splitter.data_parallel)]
    padding, imbalance = [], []
    for part in mini_batches(len(batch), actor.ppo_mini_batch_size * run.config.rollout.n):
        shares = splitter.shares(lengths[part])
        padding.append(splitter.padding_share(lengths[part], shares))
        imbalance.append(splitter.imbalance(lengths[part], shares))
        for rank, trained in enumerate(trained_rows(shares)):
            rows[rank].append(part.start + trained)
    return seqlen_metrics(lengths, [np.concatenate(of_rank) for of_rank in rows]) | {
        "actor/padding_share": float(np.mean(padding)), "actor/dp_imbalance": float(np.mean(imbalance)),
    }  # fmt: skip


def _scores(rewards: list[RewardResult]) -> np.ndarray:
    return np.array([r.score for r in rewards])


def record(run: Run, metrics: dict[str, float], timer: PhaseTimer | None = None, batch: TrainBatch | None = None) -> None:
    """Writes the line of the step that just finished."""
    timing = timing_metrics(timer.seconds) if timer else {}
    speed = speed_metrics(batch, timer.seconds, _devices(run)) if timer and batch is not None else {}
    speed["perf/cpu_memory_used_gb"] = psutil.virtual_memory().used / 1024**3
    run.record.write(run.state.step, metrics | timing | speed)


def _devices(run: Run) -> int:
    rollout = run.config.rollout
    return run.config.actor.layout.world_size + rollout.num_engines * rollout.tensor_model_parallel_size


def write_samples(run: Run, samples: list[Sample], rewards: list[RewardResult]) -> None:
    """Token ids, log-probs, versions and rewards of the coming step's samples."""
    parts = [{"score": r.score, "reason": r.reason, **r.parts} for r in rewards]
    write_samples_file(run.run_dir.samples, run.state.step + 1, samples, parts)
