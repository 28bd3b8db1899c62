"""Every metric that a run may write: name, reduction of its parts, unit, meaning. A torch-free table for code and docs.

Names are verl's where verl has the same metric, so that dashboards carry over; those under `reshard/` and `router/` are
mrl's own. A `*` in a name stands for any text without an empty part: `val-core/*/mean@*`.
"""

import difflib
import functools
import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["sum", "mean", "max", "min", "last"]


@dataclass(frozen=True)
class MetricSpec:
    """One metric, or one family of metrics with the same meaning.

    `kind` says how parts from micro-batches and ranks become one number: mean parts are (sum of value x weight, sum of
    weight), all others (value, 1). `last` takes the last part: what every rank knows alike, such as the learning rate.
    """

    name: str
    kind: Kind
    unit: str
    summary: str


def _distribution(prefix: str, unit: str, summary: str) -> list[MetricSpec]:
    return [
        MetricSpec(f"{prefix}/mean", "mean", unit, f"{summary}, mean"),
        MetricSpec(f"{prefix}/max", "max", unit, f"{summary}, largest"),
        MetricSpec(f"{prefix}/min", "min", unit, f"{summary}, smallest"),
    ]


def _phase(name: str, summary: str) -> MetricSpec:
    return MetricSpec(f"timing_s/{name}", "max", "s", f"Wall time: {summary}")


_TRAINING = [
    MetricSpec("training/global_step", "last", "steps", "Steps finished when the line was written; 0 is the start"),
    MetricSpec("training/epoch", "last", "epochs", "Passes over the training prompts that were begun before this step"),
    MetricSpec(
        "training/failed_saves",
        "last",
        "checkpoints",
        "Checkpoints that the disk did not take since the run was started",
    ),
    MetricSpec(
        "training/failed_sample_files",
        "last",
        "files",
        "Files of samples that the disk did not take since the run was started",
    ),
    MetricSpec("train/num_gen_batches", "last", "batches", "Prompt batches generated to fill this step's batch"),
    MetricSpec(
        "train/uniform_group_share", "mean", "share", "Generated groups whose responses all have the same value"
    ),
    MetricSpec("train/trained_groups", "last", "groups", "Groups that the step trained on"),
    MetricSpec(
        "train/overlong_penalty_mean",
        "mean",
        "reward",
        "Penalty of responses near the length limit, mean; with overlong_buffer",
    ),
    MetricSpec(
        "train/overlong_filtered_share", "mean", "share", "Responses cut off at the length limit, not trained on"
    ),
    MetricSpec(
        "training/rollout_probs_diff_mean", "mean", "probability", "|p_actor - p_rollout| of the sampled tokens, mean"
    ),
    MetricSpec("training/rollout_probs_diff_max", "max", "probability", "|p_actor - p_rollout|, largest"),
    MetricSpec("training/rollout_probs_diff_std", "last", "probability", "|p_actor - p_rollout|, standard deviation"),
    MetricSpec(
        "training/rollout_log_probs_abs_diff_mean",
        "mean",
        "nats",
        "|log p_actor - log p_rollout| of the sampled tokens, mean",
    ),
    MetricSpec("training/rollout_log_probs_abs_diff_max", "max", "nats", "|log p_actor - log p_rollout|, largest"),
    MetricSpec(
        "training/rollout_actor_probs_pearson_corr",
        "last",
        "1",
        "Correlation of the actor's and the rollout's probabilities",
    ),
    MetricSpec("rollout_corr/kl", "mean", "nats/token", "KL(rollout || actor), mean log ratio"),
    MetricSpec("rollout_corr/k3_kl", "mean", "nats/token", "KL(rollout || actor), the k3 estimate, never negative"),
    MetricSpec("rollout_corr/*", "mean", "1", "Off-policy correction: weights, rejected shares, perplexities"),
]

_CRITIC = [
    *_distribution("critic/score", "reward", "Score of a response, as the reward function gave it"),
    *_distribution("critic/rewards", "reward", "Reward of a response after penalties"),
    *_distribution("critic/advantages", "1", "Advantage over the response tokens"),
    *_distribution("critic/returns", "1", "Return over the response tokens"),
    MetricSpec(
        "reward/failed",
        "sum",
        "responses",
        "Responses whose reward function raised, hung, died or gave no finite number",
    ),
    MetricSpec("reward/failure_share", "mean", "share", "Failed rewards over all rewards of the step"),
]

_ACTOR = [
    MetricSpec("actor/pg_loss", "mean", "1", "Policy loss"),
    MetricSpec(
        "actor/pg_clipfrac", "mean", "share", "Share of response tokens that the band clips; under GSPO whole sequences"
    ),
    MetricSpec("actor/pg_clipfrac_lower", "mean", "share", "Share clipped by the dual clip"),
    MetricSpec("actor/ppo_kl", "mean", "nats/token", "KL(old || current), mean log ratio"),
    MetricSpec(
        "actor/log_seq_ratio_mean", "mean", "nats/token", "Log of the sequence ratio current/old, length-normalised"
    ),
    MetricSpec(
        "actor/log_seq_ratio_square_mean",
        "mean",
        "nats²",
        "Second moment of the log sequence ratio; becomes its standard deviation",
    ),
    MetricSpec(
        "actor/log_seq_ratio_std",
        "last",
        "nats/token",
        "Standard deviation of the log sequence ratio: the scale of a clip band",
    ),
    MetricSpec(
        "actor/entropy", "mean", "nats/token", "Entropy of the policy that generated, mean over response tokens"
    ),
    MetricSpec("actor/entropy_loss", "mean", "nats/token", "Entropy as it stands in the loss, under its aggregation"),
    MetricSpec("actor/kl_loss", "mean", "nats", "KL to the reference model as it stands in the loss"),
    MetricSpec("actor/kl_coef", "last", "1", "Coefficient of the KL loss"),
    MetricSpec("actor/reward_kl_penalty", "mean", "1", "KL to the reference model taken off a response's reward"),
    MetricSpec("actor/grad_norm", "mean", "1", "Gradient norm before clipping, mean over the step's updates"),
    MetricSpec("actor/lr", "last", "1", "Learning rate of the step's last update"),
    MetricSpec("actor/updates", "sum", "updates", "Optimizer updates of the step"),
    MetricSpec(
        "actor/recomputed_layers",
        "max",
        "layers",
        "Layers that a rank computed twice in the step's updates; with recompute",
    ),
    MetricSpec(
        "actor/early_reductions",
        "max",
        "groups of buckets",
        "Gradient sums over replicas that had begun when their backward ended, of a rank; with overlap_grad_reduce",
    ),
    MetricSpec("actor/model_chunks", "max", "chunks", "Model chunks of a rank, with virtual pipeline stages"),
    MetricSpec(
        "offload/*_bytes",
        "max",
        "bytes",
        "On the host and not on the device, largest rank: parameters, optimizer; gradients (dropped)",
    ),
    MetricSpec(
        "actor/skipped_updates",
        "sum",
        "updates",
        "Updates left out: a gradient norm not finite, or every token rejected",
    ),
]

_MARKS = [
    MetricSpec(
        "ran/*/*",
        "sum",
        "responses",
        "Trained responses on which the named code ran: ran/adv_estimator/NAME, ran/policy_loss/NAME, and "
        "ran/anchor/NAME of an anchor that is not recompute; ones of no token are left out, and under several "
        "updates each response counts in one",
    ),
]

_LENGTHS = [
    *_distribution("response_length", "tokens", "Response length"),
    MetricSpec("response_length/clip_ratio", "mean", "share", "Responses as long as the longest allowed"),
    *_distribution("prompt_length", "tokens", "Prompt length"),
    MetricSpec("prompt_length/clip_ratio", "mean", "share", "Prompts as long as the longest allowed"),
    MetricSpec(
        "actor/padding_share",
        "mean",
        "share",
        "Of the tokens that an update computes, those that are padding or alignment",
    ),
    MetricSpec(
        "actor/packed_sequences", "mean", "sequences", "Sequences of a packed row, mean; with use_remove_padding"
    ),
    MetricSpec(
        "actor/token_budget_share",
        "max",
        "share",
        "Of its token budget, what the fullest micro-batch takes; with use_dynamic_bsz",
    ),
    MetricSpec(
        "actor/dp_imbalance",
        "mean",
        "share",
        "How much more than the mean the costliest data-parallel rank computes in an update",
    ),
    MetricSpec("global_seqlen/min", "min", "tokens", "Smallest load of a data-parallel rank, batch cut in order"),
    MetricSpec("global_seqlen/max", "max", "tokens", "Largest load of a data-parallel rank, batch cut in order"),
    MetricSpec("global_seqlen/minmax_diff", "max", "tokens", "Largest minus smallest load, batch cut in order"),
    MetricSpec("global_seqlen/balanced_min", "min", "tokens", "Smallest load of a data-parallel rank as trained"),
    MetricSpec("global_seqlen/balanced_max", "max", "tokens", "Largest load of a data-parallel rank as trained"),
    MetricSpec("global_seqlen/mean", "mean", "tokens", "Mean load of a data-parallel rank"),
]

_TIMING = [
    _phase("gen", "generation, rewards overlapping; where it runs ahead of training, the wait for a batch"),
    _phase("reshard", "weights from the trainer into the engines, proof included"),
    _phase("reward", "waiting for rewards after generation"),
    _phase("old_log_prob", "log-probs under the old policy; not with anchor on_policy"),
    _phase("ref", "log-probs under the reference model"),
    _phase("adv", "advantages"),
    _phase("update_actor", "all updates of the step"),
    _phase("save_checkpoint", "saving, as far as training waits for it"),
    _phase("testing", "validation"),
    _phase("switch", "hand-overs of shared devices before log-probs and before the update"),
    _phase("record", "waiting for the writer of samples, which is a step behind at most"),
    _phase("step", "the whole step"),
    _phase("pause", "pausing engines that hold what they are at, where generation runs ahead"),
    _phase("settle", "waiting until engines may be given other weights, where generation runs ahead"),
    _phase("outside", "of the step, what no phase counts"),
    MetricSpec(
        "timing_per_token_ms/gen", "max", "ms/token", "Generation time, not the wait for it, over response tokens"
    ),
    MetricSpec("timing_per_token_ms/*", "max", "ms/token", "Phase time over all tokens of the batch"),
]

_PERF = [
    MetricSpec("perf/total_num_tokens", "sum", "tokens", "Prompt and response tokens of the step"),
    MetricSpec("perf/time_per_step", "max", "s", "Wall time of the step"),
    MetricSpec("perf/throughput", "last", "tokens/s/device", "Tokens of the step over its time and devices"),
    MetricSpec(
        "perf/max_memory_allocated_gb",
        "max",
        "GiB",
        "Peak of memory in use since the update before, largest rank; on CPU its resident set",
    ),
    MetricSpec(
        "perf/max_memory_reserved_gb",
        "max",
        "GiB",
        "Peak of memory that the allocator holds since the update before, largest rank; on CPU the same",
    ),
    MetricSpec("perf/cpu_memory_used_gb", "max", "GiB", "Host memory in use, fullest host"),
    MetricSpec(
        "perf/checkpoint_write_s",
        "max",
        "s",
        "Writing a checkpoint beside the training, told by the step in which it ended",
    ),
    MetricSpec("perf/update_s", "max", "s", "Time of all updates on a rank, its device waited for, slowest rank"),
    MetricSpec(
        "perf/mfu/actor",
        "mean",
        "share",
        "FLOPs of the update over what the ranks' devices could do in its time on them",
    ),
    MetricSpec(
        "perf/mfu/step",
        "mean",
        "share",
        "FLOPs of generation, log-probs and update over what all devices could do in the step",
    ),
    MetricSpec(
        "perf/kv_cache_peak",
        "max",
        "share",
        "Of the KV cache's blocks, in use at once under the weights before the sync; fullest engine",
    ),
    MetricSpec(
        "perf/preemptions",
        "sum",
        "requests",
        "Requests that an engine dropped for want of KV cache and computed anew, since the sync before",
    ),
]

_RESHARD = [
    MetricSpec(
        "rollout/stale_prefix_tokens",
        "sum",
        "tokens",
        "Prompt tokens that a prefix cache held from other weights than served; 0, or a defect",
    ),
    MetricSpec(
        "reshard/bytes_required", "last", "bytes", "Bytes that the engines must receive and do not hold already"
    ),
    MetricSpec("reshard/bytes_moved", "last", "bytes", "Bytes sent"),
    MetricSpec("reshard/bytes_local", "last", "bytes", "Bytes that stayed on a device that trainer and engine share"),
    MetricSpec("reshard/bytes_remote", "last", "bytes", "Bytes sent that left a node; part of bytes_moved"),
    MetricSpec("reshard/engines", "last", "engines", "Engines whose workers all hold what the ranks sent"),
    MetricSpec("reshard/workers", "last", "workers", "Engine workers that received weights, each into its own slices"),
    MetricSpec("reshard/resynced", "sum", "engines", "Engines whose first sync of the step failed and was done again"),
    MetricSpec("reshard/seconds", "max", "s", "Time of one sync, slowest rank"),
    MetricSpec("reshard/peak_staging_bytes", "max", "bytes", "Largest staging memory of a rank"),
    MetricSpec(
        "reshard/verified",
        "min",
        "0 or 1",
        "1 when what every engine finally holds was read back and is what the ranks sent",
    ),
    MetricSpec("reshard/weight_version", "last", "versions", "Version that the engines hold after the sync"),
    MetricSpec("router/frozen", "max", "tensors", "Router matrices of a rank that are not trained; with freeze_router"),
    MetricSpec(
        "router/drift", "mean", "share", "Tokens of a layer that go to another set of experts than at the old log-probs"
    ),
    MetricSpec(
        "router/missing_routes",
        "mean",
        "share",
        "With R3, tokens of a layer that came to the update without the engine's experts",
    ),
    MetricSpec(
        "router/rollout_drift",
        "mean",
        "share",
        "With R3, tokens of a layer whose experts in the engine are not the trainer's choice",
    ),
    MetricSpec(
        "router/max_violation", "mean", "1", "Load of the busiest expert over the mean load, less 1; mean over layers"
    ),
    MetricSpec("router/load/max", "max", "1", "Load of the busiest expert over the mean load"),
    MetricSpec("router/load/min", "min", "1", "Load of the idlest expert over the mean load"),
]

_SWITCH = [
    MetricSpec(
        "switch/sleep_s", "max", "s", "Colocated: engines going to sleep before the actor's turn, slowest engine"
    ),
    MetricSpec(
        "switch/onload_s",
        "max",
        "s",
        "Colocated: parameters, gradients and optimizer coming onto the devices, slowest rank",
    ),
    MetricSpec("switch/offload_s", "max", "s", "Colocated: the same leaving them, slowest rank"),
    MetricSpec(
        "switch/gate_s",
        "max",
        "s",
        "Colocated: asking all processes what they hold, before something comes onto the devices",
    ),
    MetricSpec(
        "switch/wake_weights_s", "max", "s", "Colocated: engines taking memory for their weights, slowest engine"
    ),
    MetricSpec("switch/wake_kv_s", "max", "s", "Colocated: engines taking memory for their cache, slowest engine"),
]

_AHEAD = [
    *_distribution(
        "training/off_policy/trajectory_staleness", "updates", "Age of a response's oldest token when it is trained on"
    ),
    MetricSpec("async/versions_per_sample", "mean", "versions", "Versions of the weights that made a response, mean"),
    MetricSpec(
        "async/recomputed_tokens",
        "sum",
        "tokens",
        "Prompt and response tokens computed once more, where a response went on by other weights",
    ),
    MetricSpec(
        "async/window", "last", "responses", "Responses that may be under way: fewer where KV caches are short of room"
    ),
    MetricSpec("async/requeued_groups", "last", "groups", "Groups that began anew because their tokens were too old"),
    MetricSpec(
        "async/groups_ahead",
        "last",
        "groups",
        "Groups on their way or finished when the weights of the step before were there",
    ),
    MetricSpec("async/dropped_groups", "last", "groups", "Groups that nobody was trained on, since the run began"),
    MetricSpec(
        "async/dropped_response_length/*", "last", "tokens", "Length of responses that were dropped, mean by cause"
    ),
    MetricSpec(
        "async/kept_response_length",
        "last",
        "tokens",
        "Length of responses that were trained on, mean since the run began",
    ),
]

_VALIDATION = [
    MetricSpec(
        "val-core/*/mean@*",
        "last",
        "reward",
        "Mean over n responses a prompt, per data source: val-core/SOURCE/acc/mean@N",
    ),
    MetricSpec(
        "val-core/*/best@*",
        "last",
        "reward",
        "Best of n responses a prompt, expected and its standard deviation, per data source",
    ),
    MetricSpec(
        "val-core/*/maj@*", "last", "reward", "Score of the most frequent of n answers a prompt, per data source"
    ),
    MetricSpec(
        "val-aux/*/ci95_low", "last", "reward", "Lower end of the 95 % interval over prompts of the metric before it"
    ),
    MetricSpec(
        "val-aux/*/ci95_high", "last", "reward", "Upper end of the 95 % interval over prompts of the metric before it"
    ),
    MetricSpec(
        "val-aux/reward_failed", "last", "responses", "Responses of the validation whose reward function failed"
    ),
    MetricSpec("val-aux/response_length/mean", "last", "tokens", "Length of the validation's responses, mean"),
    MetricSpec(
        "val-aux/response_length/clip_ratio",
        "last",
        "share",
        "Validation responses that were cut off at the length limit",
    ),
    MetricSpec("val-aux/*", "last", "1", "Other observations of validation per data source"),
]

METRICS: tuple[MetricSpec, ...] = (
    *_TRAINING, *_CRITIC, *_ACTOR, *_MARKS, *_LENGTHS, *_TIMING, *_PERF, *_RESHARD, *_SWITCH, *_AHEAD, *_VALIDATION,
)  # fmt: skip

# standard deviation <- (first moment, second moment): parts of a deviation do not add up, those of its moments do
DEVIATIONS: dict[str, tuple[str, str]] = {
    "actor/log_seq_ratio_std": ("actor/log_seq_ratio_mean", "actor/log_seq_ratio_square_mean")
}

_EXACT = {spec.name: spec for spec in METRICS if "*" not in spec.name}
_PATTERNS = [(re.compile(re.escape(spec.name).replace(r"\*", "(.+)")), spec) for spec in METRICS if "*" in spec.name]


@functools.cache
def metric_spec(name: str) -> MetricSpec:
    """The entry that governs `name`: an exact one, else the first pattern that fits.

    Raises KeyError with the nearest names.
    """
    if name in _EXACT:
        return _EXACT[name]
    for pattern, spec in _PATTERNS:
        if pattern.fullmatch(name):
            return spec
    nearest = difflib.get_close_matches(name, [spec.name for spec in METRICS], n=3, cutoff=0.5)
    raise KeyError(
        f"no metric is declared under the name {name!r}; nearest in mrl/record/spec.py: {', '.join(nearest) or 'none'}"
    )
