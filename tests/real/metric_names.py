"""Which declared metrics a real run writes; those that it does not write are listed here with the reason."""

from collections.abc import Iterable, Mapping

from mrl.record.spec import all_metrics, metric_spec

# declared, and in no line of any run
NEVER = {
    "actor/log_seq_ratio_square_mean": "a part of actor/log_seq_ratio_std, which is written in its place",
}
# what a run does -> names that it writes because of that
REFERENCE, KL_LOSS, KL_REWARD, OVERLONG = "a reference model", "use_kl_loss", "use_kl_in_reward", "overlong_filter"
R3, PREDICTIONS = "router_replay R3", "a reward that says what was answered (pred)"
COLOCATED, AHEAD = "colocated placement", "generation ahead of training"
PENALTY, DYNAMIC, OFFLOAD = "overlong_buffer", "use_dynamic_bsz", "offload"
READY_FIRST, TURNS = "order: ready_first", "rollout.turns"
FAILING, ENDPOINT = "environments that fail", "rollout.endpoint"
BAD_NUMBERS = "log-probs that are not finite"
DISTILLATION, WORDS = "a teacher in advantages", "a loss over a teacher's likeliest words"
CRITIC = "a critic"
REPLICAS = "several replicas"
VALIDATION, SAVING, STEPS_AFTER_SAVING = "validation", "saving", "a step after one that saved"
WRITTEN_WITH = {
    REFERENCE: {"timing_s/ref"},
    KL_LOSS: {"actor/kl_loss"},
    KL_REWARD: {"actor/kl_coef", "actor/reward_kl", "actor/reward_kl_penalty"},  # tests/unit/test_loop.py
    DISTILLATION: {
        "timing_s/teacher",
        *(spec.name for spec in all_metrics() if spec.name.startswith("distillation/")),
    }
    - {"distillation/teacher_mass"},  # tests/unit/test_distillation.py
    WORDS: {"distillation/teacher_mass"},
    OVERLONG: {"train/overlong_filtered_share"},  # tests/unit/test_loop.py
    PENALTY: {"train/overlong_penalty_mean"},
    DYNAMIC: {"actor/token_budget_share"},
    OFFLOAD: {"offload/*_bytes"},
    R3: {"router/missing_routes", "router/rollout_drift"},
    COLOCATED: {spec.name for spec in all_metrics() if spec.name.startswith("switch/")},
    VALIDATION: {"timing_s/testing", *(spec.name for spec in all_metrics() if spec.name.startswith("val-"))}
    - {"val-core/*/maj@*", "val-aux/environment_failed", "val-aux/not_finite"},
    PREDICTIONS: {"val-core/*/maj@*"},  # tests/unit/test_validation.py
    SAVING: {"timing_s/save_checkpoint"},
    CRITIC: {
        "timing_s/values",
        "timing_s/update_critic",
        *(f"critic/{name}" for name in ("vpred_mean", "grad_norm", "lr", "skipped_updates")),
        *(spec.name for spec in all_metrics() if spec.name.startswith(("critic/values/", "critic/vf_"))),
    },
    STEPS_AFTER_SAVING: {"perf/checkpoint_write_s"},
    AHEAD: {
        "timing_s/pause",
        "timing_s/settle",
        *(spec.name for spec in all_metrics() if spec.name.startswith(("async/", "training/off_policy/"))),
    }
    - {"async/window"},
    READY_FIRST: {"async/window"},
    TURNS: {
        spec.name for spec in all_metrics() if spec.name.startswith(("turns/", "tools/"))
    }  # tests/real/test_turns.py
    - {"turns/left_out"},
    REPLICAS: {"actor/replica_grad_norm/*"},  # tests/real/test_overlap.py
    "actor.mtp.train": {"actor/mtp_loss", "actor/mtp_grad_norm", "actor/mtp_skipped_updates"},  # test_drafts_run.py
    "speculation": {spec.name for spec in all_metrics() if spec.name.startswith("drafts/")},  # test_drafts_run.py
    ENDPOINT: {spec.name for spec in all_metrics() if spec.name.startswith("endpoint/")},  # tests/unit/test_turns.py
    FAILING: {"turns/left_out", "val-aux/environment_failed"},  # tests/unit/test_trajectory.py, test_validation.py
    BAD_NUMBERS: {"train/not_finite_share", "val-aux/not_finite"},  # tests/unit/test_sampling.py, test_trajectory.py
}


def check_names(rows: Iterable[Mapping], *does: str) -> None:
    """Every name in `rows` is declared, and every declared name is in them, but those of what the run does not do (see
    `does`).

    Raises KeyError for a name that is not declared.
    """
    written = {metric_spec(name).name for row in rows for name in row}
    absent = set(NEVER).union(*(names for what, names in WRITTEN_WITH.items() if what not in does))
    declared = {spec.name for spec in all_metrics()}
    assert absent <= declared, f"no longer declared: {sorted(absent - declared)}"
    assert written == declared - absent, (
        f"not written: {sorted(declared - absent - written)}, unexpected: {sorted(written & absent)}"
    )
