"""Where the trust region of a step starts from, and which of its tokens are trained on with which weight."""

import dataclasses

import numpy as np

from mrl.algo.correction import CorrectionParameters, correct, without_truncated
from mrl.config.schema import AlgorithmConfig, RunConfig
from mrl.data.batch import Sample, TrainBatch
from mrl.errors import NumericAbort


def corrected(config: RunConfig, batch: TrainBatch, samples: list[Sample]) -> tuple[TrainBatch, dict[str, float]]:
    """The batch without what the over-long filter and the rollout correction reject, weighted, under the chosen anchor; and metrics.

    `batch.old_log_probs` are the trainer's. What is rejected is out of the loss alone: its score stays in its group's mean and standard
    deviation, as in DAPO, whose filter masks the loss. Raises NumericAbort when nothing is left to train on.
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
    _check_left(algorithm, batch, mask, metrics)
    old = batch.rollout_log_probs if algorithm.anchor == "rollout" else batch.old_log_probs
    return dataclasses.replace(batch, old_log_probs=old, keep=mask, loss_weights=weights), metrics


def _check_left(algorithm: AlgorithmConfig, batch: TrainBatch, mask: np.ndarray, metrics: dict[str, float]) -> None:
    if mask.any() or not batch.response_mask.any():
        return
    dropped, cures = [], []
    if algorithm.overlong_filter:
        dropped.append(f"algorithm.overlong_filter dropped {metrics['train/overlong_filtered_share']:.0%} of the responses")
        cures.append("raise data.max_response_length, or look at why no response ends")
    if algorithm.rollout_correction.level is not None:
        dropped.append("algorithm.rollout_correction rejected every token" + " of the rest" * bool(dropped))
        cures.append(
            "widen the band of the correction, or look at rollout_corr/k3_kl: generation and training may not hold the same weights"
        )
    raise NumericAbort(f"nothing of the step is left to train on: {' and '.join(dropped)}. To cure it: {'; '.join(cures)}")
