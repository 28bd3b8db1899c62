"""One function a phase of the loop. Each takes the run and what the phase works on, and returns what the next one needs."""

import dataclasses
from collections.abc import Mapping

import numpy as np
import psutil

from mrl.algo.advantages import AdvantageInputs, compute_advantages
from mrl.algo.correction import mismatch_metrics
from mrl.algo.kl import kl_in_reward
from mrl.data.batch import Prompt, Sample, TrainBatch, collate
from mrl.data.order import DataCursor
from mrl.data.routes import MISSING
from mrl.data.tokenizer import pad_token_id
from mrl.errors import EnvironmentFault
from mrl.megatron.batching import Splitter, mini_batches, trained_rows
from mrl.model import load_model_spec
from mrl.model.layout import TrainLayout
from mrl.record.metrics import PhaseTimer, batch_metrics, reduce_parts, reward_metrics, seqlen_metrics, speed_metrics, timing_metrics
from mrl.record.run_dir import write_samples as write_samples_file
from mrl.reward.items import RewardResult
from mrl.train.responding import respond
from mrl.train.run import Run
from mrl.train.seeds import sample_seed
from mrl.vllm.settings import training_sampling

TRAIN = "train"


def next_prompts(run: Run, cursor: DataCursor) -> tuple[list[Prompt], DataCursor]:
    """The prompts at `cursor`, and where the next ones begin."""
    return run.train_prompts.next_batch(cursor)


def generate(run: Run, prompts: list[Prompt], gen_batch: int = 0) -> list[Sample]:
    """`rollout.n` responses a prompt, ordered by prompt; each is handed to the reward pool as it arrives.

    `gen_batch` counts the batches of prompts of one step, so that a prompt drawn twice in it is not answered alike.
    """
    n, seed, step = run.config.rollout.n, run.config.trainer.seed, run.state.step + 1
    first = gen_batch * n
    run.actor.offload()
    return respond(
        run, prompts, n, training_sampling(run.config), lambda p, k: sample_seed(seed, TRAIN, step, p.prompt_id, first + k), TRAIN
    )


def with_old_log_probs(run: Run, samples: list[Sample]) -> tuple[TrainBatch, dict[str, float]]:
    """The samples as a batch, with log-probs of the same weights under Megatron's numerics; the policy's entropy, and how far apart
    generation and training are. Raises NumericAbort for log-probs that are not finite, EnvironmentFault when no sample has a route of R3.
    """
    if run.config.actor.router_replay == "R3":
        check_any_route(samples)
    batch = collate(samples, run.config.rollout.temperature, pad_token_id(run.tokenizer))
    log_probs, entropy = run.actor.log_probs(batch)
    apart = mismatch_metrics(batch.rollout_log_probs, log_probs, batch.response_mask)
    return dataclasses.replace(batch, old_log_probs=log_probs), {"actor/entropy": entropy} | apart


def check_any_route(samples: list[Sample]) -> None:
    """Some may be missing, as those of cached prompts are; where all are, nothing would be replayed under the name of R3."""
    if not any(sample.routes is not None and (sample.routes != MISSING).any() for sample in samples):
        raise EnvironmentFault(
            f"actor.router_replay: R3, and the vLLM engines (rollout) returned no route for any of {len(samples)} samples; "
            "see logs/engine-N.log in the run directory, or set actor.router_replay: R2 or disabled, which need none"
        )


def with_ref_log_probs(run: Run, batch: TrainBatch) -> TrainBatch:
    """The batch with the reference model's log-probs."""
    return dataclasses.replace(batch, ref_log_probs=run.actor.ref_log_probs(batch))


def kl_penalties(run: Run, batch: TrainBatch) -> tuple[np.ndarray | None, dict[str, float]]:
    """What the KL to the reference model takes off each token's reward, [batch, response_length]; None without use_kl_in_reward."""
    algorithm = run.config.algorithm
    if not algorithm.use_kl_in_reward:
        return None, {}
    penalties = kl_in_reward(batch.old_log_probs, batch.ref_log_probs, algorithm.kl_penalty, algorithm.kl_ctrl.kl_coef)
    of_response = np.where(batch.response_mask, penalties, 0.0).sum(-1)
    return penalties, {"actor/reward_kl_penalty": float(of_response.mean()), "actor/kl_coef": algorithm.kl_ctrl.kl_coef}


def with_advantages(
    run: Run, batch: TrainBatch, samples: list[Sample], rewards: np.ndarray, parts: Mapping[str, np.ndarray], penalties: np.ndarray | None
) -> TrainBatch:
    """The batch with every response's advantage on its trained tokens.

    `rewards` and each of `parts` (of the reward) are [batch]; `penalties` [batch, response_length] are taken off the reward.
    """
    algorithm = run.config.algorithm
    inputs = AdvantageInputs(
        rewards,
        np.array([s.group_id for s in samples]),
        batch.loss_mask,
        algorithm.norm_adv_by_std_in_grpo,
        token_penalties=penalties,
        response_mask=batch.response_mask,
        parts=parts,
        part_weights=dict(zip(algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights, strict=False)),
    )
    return dataclasses.replace(batch, advantages=compute_advantages(algorithm.adv_estimator, inputs))


def update(run: Run, batch: TrainBatch) -> dict[str, float]:
    """All optimizer steps on the batch; reduced metrics. Raises NumericAbort when too many in a row could not be applied."""
    metrics = reduce_parts(run.actor.update(batch))
    updates = -(-len(batch) // (run.config.actor.ppo_mini_batch_size * run.config.rollout.n))
    return metrics | {"actor/updates": updates - metrics["actor/skipped_updates"]}


def sync_weights(run: Run) -> dict[str, float]:
    """Brings every engine to the trained weights, as the version that the coming finished step has."""
    return bring_engines_to(run, run.state.step + 1)


def bring_engines_to(run: Run, version: int) -> dict[str, float]:
    """The trained weights into every engine; metrics of the sync. Raises Interrupted when an engine could not be brought there."""
    return run.sync.bring_to(version)


def due(run: Run, freq: int) -> bool:
    """Whether something done every `freq` steps is done after the step that just finished; the last step always does it."""
    return freq > 0 and (run.state.step % freq == 0 or run.state.step == run.total_steps)


def step_metrics(run: Run, batch: TrainBatch, results: list[RewardResult], rewards: np.ndarray) -> dict[str, float]:
    """What the step's samples say: lengths, scores, rewards after penalties, advantages."""
    return {
        "training/epoch": float(run.state.cursor.epoch),
        **reward_metrics(np.array([r.score for r in results]), rewards),
        **batch_metrics(batch, run.config.data.max_prompt_length, run.config.data.max_response_length),
        **_load_metrics(run, batch),
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
    parts = [{**r.parts, "score": r.score, "reason": r.reason} for r in rewards]
    write_samples_file(run.run_dir.samples, run.state.step + 1, samples, parts)
