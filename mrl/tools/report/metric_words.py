"""Names of metrics in words, for the legends of charts whose titles say the rest."""

import re

_WORDS = {
    r"critic/score/mean": "mean score",
    r"critic/rewards/mean": "after penalties",
    r"val-core/(?P<what>.*)/(?:acc|reward)/mean@(?P<n>\d+)": "{what}, mean of {n}",
    r"actor/ppo_kl": "to the old policy",
    r"actor/kl_loss": "to the reference, in the loss",
    r"actor/reward_kl_penalty": "to the reference, in the reward",
    r"distillation/reverse_kl": "from the policy to its teacher",
    r"distillation/loss": "the loss's estimate",
    r"actor/entropy": "entropy",
    r"actor/pg_clipfrac": "clipped",
    r"actor/pg_clipfrac_lower": "clipped by the dual clip",
    r"rollout_corr/k3_kl": "KL, k3 estimate",
    r"training/rollout_log_probs_abs_diff_mean": "mean",
    r"training/rollout_log_probs_abs_diff_max": "largest",
    r"(?P<what>actor|critic)/(?:grad_norm|lr)": "{what}",
    r"critic/vf_explained_var": "explained",
    r"actor/log_seq_ratio_std": "standard deviation",
    r"response_length/clip_ratio": "training",
    r"val-aux/response_length/clip_ratio": "validation",
    r".*/(?:response_length|trajectory_staleness|load)/mean": "mean",
    r"(?:.*/)?(?:response_length|trajectory_staleness|load)/max": "largest",
    r"(?:.*/)?(?:response_length|trajectory_staleness|load)/min": "smallest",
    r"response_length/mean": "mean",
    r"train/uniform_group_share": "share of groups",
    r"router/drift": "within the update",
    r"router/rollout_drift": "engine against trainer",
    r"router/missing_routes": "without routes",
    r"perf/throughput": "tokens a second and device",
    r"perf/max_memory_allocated_gb": "allocated, fullest rank",
    r"perf/max_memory_reserved_gb": "reserved, fullest rank",
    r"perf/cpu_memory_used_gb": "host memory in use",
    r"async/versions_per_sample": "versions, mean",
    r"async/groups_ahead": "ahead",
    r"async/dropped_groups": "dropped",
    r"drafts/acceptance_at/(?P<what>\d+)": "position {what}",
}


def in_words(metric: str) -> str:
    """Returns a metric's name in words, or the name where there are none."""
    for pattern, words in _WORDS.items():
        if found := re.fullmatch(pattern, metric):
            return words.format(**found.groupdict())
    return metric
