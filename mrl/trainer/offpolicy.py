"""Where the trust region of a step starts from, and which of its tokens are trained on with which weight."""

import dataclasses

import numpy as np

from mrl.algo.correction import CorrectionParameters, correct
from mrl.algo.overlong import without_truncated
from mrl.config.schema import RunConfig
from mrl.data.batch import Sample, TrainBatch
from mrl.errors import NumericAbort


def corrected(config: RunConfig, batch: TrainBatch, samples: list[Sample]) -> tuple[TrainBatch, dict[str, float]]:
    """The batch without what the over-long filter and the rollout correction reject, weighted, under the chosen anchor; and metrics.

    `batch.old_log_probs` are the trainer's. Raises NumericAbort when nothing is left to train on.
    """
    algorithm, metrics = config.algorithm, {}
    mask = batch.response_mask
    if algorithm.overlong_filter:
        truncated = np.array([s.stop_reason == "length" for s in samples])
        mask = without_truncated(mask, truncated)
        metrics["train/overlong_filtered_share"] = float(truncated.mean())
    weights, correction = None, algorithm.rollout_correction
    if correction.level is not None:
        parameters = CorrectionParameters(correction.level, correction.mode, correction.low, correction.high)
        result = correct(parameters, batch.old_log_probs, batch.rollout_log_probs, mask)
        mask, weights = result.keep, result.weights
        metrics |= result.metrics
    _check_left(batch, mask, metrics)
    old = batch.rollout_log_probs if algorithm.anchor == "rollout" else batch.old_log_probs
    return dataclasses.replace(batch, old_log_probs=old, keep=mask, loss_weights=weights), metrics


def _check_left(batch: TrainBatch, mask: np.ndarray, metrics: dict[str, float]) -> None:
    if mask.any() or not batch.response_mask.any():
        return
    filtered = metrics.get("train/overlong_filtered_share", 0.0)
    raise NumericAbort(
        f"nothing of the step is left to train on: algorithm.overlong_filter dropped {filtered:.0%} of the responses and "
        "algorithm.rollout_correction every token of the rest. Raise data.max_response_length, widen the band of the correction, or look "
        "at rollout_corr/k3_kl: generation and training may not hold the same weights"
    )
