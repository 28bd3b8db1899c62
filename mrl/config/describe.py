"""Describes a run in one line each: its loss, its batches, its layout. Every resolved configuration shows the loss."""

from mrl.algo.spec import AGGREGATIONS, LOSSES
from mrl.config.schema import RunConfig
from mrl.model import ModelSpec
from mrl.model.layout import TrainLayout


def describe_loss(config: RunConfig) -> str:
    """Describes the loss, such as `gspo, seq-mean-token-mean, clip 0.0003/0.0004, 4 updates per rollout`.

    KL, entropy and other parts follow where they are used.
    """
    algorithm = config.algorithm
    loss = config.algorithm.policy_loss
    spec = LOSSES.get(loss.loss_mode)
    aggregation = AGGREGATIONS.get(loss.loss_agg_mode)
    scaled = aggregation is not None and aggregation.needs_scale_factor and loss.loss_scale_factor is not None
    updates = config.updates_per_step
    adapts = " and adaptive" if algorithm.kl_ctrl.type != "fixed" else ""
    parts = [
        loss.loss_mode,
        loss.loss_agg_mode + (f" / {loss.loss_scale_factor:g}" if scaled else ""),
        f"clip {loss.clip_ratio_low:g}/{loss.clip_ratio_high:g}",
        f"dual clip {loss.clip_ratio_c:g}" if spec is not None and spec.has_dual_clip else "",
        f"{algorithm.kl_loss_type} KL x {algorithm.kl_loss_coef:g}" if algorithm.use_kl_loss else "",
        f"{algorithm.kl_penalty} KL x {algorithm.kl_ctrl.kl_coef:g}{adapts} off rewards"
        if algorithm.use_kl_in_reward
        else "",
        f"entropy x {algorithm.entropy_coeff:g}" if algorithm.entropy_coeff else "",
        f"{updates} update{'s' if updates != 1 else ''} per rollout",
        *_what_is_trained_on(config),
    ]
    return ", ".join(part for part in parts if part)


def _what_is_trained_on(config: RunConfig) -> list[str]:
    """Describes estimator, anchor, correction, sampling and lengths where they differ from the default."""
    algorithm = config.algorithm
    correction = config.algorithm.rollout_correction
    low = ""
    if correction.low is not None:
        low = f"{correction.low:g} to "
    weight = ""
    if correction.weigh is False:
        weight = ", weight 1"
    rejects = ""
    if correction.reject is not None:
        band = "" if correction.reject_low is None else f"{correction.reject_low:g} to "
        rejects = f", {correction.reject} rejection {band}{correction.reject_high:g}"
    return [
        f"advantages {algorithm.adv_estimator}" if algorithm.adv_estimator != "grpo" else "",
        f"anchor {algorithm.anchor}" if algorithm.anchor != "recompute" else "",
        f"rollout correction {correction.level} {correction.mode} {low}{correction.high:g}{weight}{rejects}"
        if correction.level
        else "",
        "dynamic sampling" if algorithm.filter_groups.enable else "",
        f"overlong penalty in the last {algorithm.overlong_buffer.len} tokens"
        if algorithm.overlong_buffer.enable
        else "",
        "cut-off responses left out" if algorithm.overlong_filter else "",
        *_teacher(config),
    ]


def _teacher(config: RunConfig) -> list[str]:
    """Describes the teacher's part: where its KL is added, and the weight of rewards."""
    distillation = config.distillation
    if not distillation.enabled:
        return []
    loss = distillation.distillation_loss
    target = "the loss"
    if loss.use_policy_gradient:
        target = "advantages"
    rewards = ""
    if loss.reward_weight != 1:
        rewards = f"rewards x {loss.reward_weight:g}"
    return [f"{loss.loss_mode} to a teacher x {loss.distillation_loss_coef:g} in {target}", rewards]


def describe_batch(config: RunConfig) -> str:
    """Describes how a step's samples are divided.

    For example `256 prompts x 16 = 4096 samples a step, 4 updates of 1024 samples, DP 4: 256 samples a rank, cut to
    10240 tokens a device`.
    """
    prompts = config.data.train_batch_size
    n = config.rollout.n
    mini = config.actor.ppo_mini_batch_size
    actor = config.actor
    dp = config.actor.layout.data_parallel_size
    updates = config.updates_per_step
    epochs = f" in {actor.ppo_epochs} epochs" if actor.ppo_epochs > 1 else ""
    by_tokens = f"{actor.ppo_max_token_len_per_gpu} tokens a device"
    by_samples = f"{actor.ppo_micro_batch_size_per_gpu} samples"
    size = by_tokens if actor.use_dynamic_bsz else by_samples
    return (
        f"{prompts} prompts x {n} = {prompts * n} samples a step, {updates} update{'s' if updates != 1 else ''} of "
        f"{mini * n} samples{epochs}, DP {dp}: {mini * n // dp} samples a rank, cut to {size}"
    )


def describe_settings(config: RunConfig) -> str:
    """Describes what users change first, each with its key."""
    data, trainer = config.data, config.trainer
    parts = [
        f"learning rate {config.actor.optim.lr:g} (actor.optim.lr)",
        f"{data.train_batch_size} prompts x {config.rollout.n} responses a step (data.train_batch_size, rollout.n)",
        f"at most {data.max_prompt_length} + {data.max_response_length} tokens (data.max_prompt_length, "
        "data.max_response_length)",
        f"{trainer.total_training_steps} steps (trainer.total_training_steps)"
        if trainer.total_training_steps
        else f"{trainer.total_epochs} epochs (trainer.total_epochs)",
        f"validation {_every(trainer.test_freq, 'never')} (trainer.test_freq)",
        f"checkpoint {_every(trainer.save_freq, 'only at the end')} (trainer.save_freq)",
    ]
    return f"{'; '.join(parts)}; change them with --set KEY=VALUE"


def _every(steps: int, otherwise: str) -> str:
    if steps < 1:
        return otherwise
    return f"every {steps} steps"


def describe_layout(config: RunConfig, model: ModelSpec) -> str:
    """Describes the layout, such as `actor 2 x cpu (TP 2, EP 2), 1 engine x TP 1, separate`.

    Degrees of 1 are left out. A critic is named where it has a layout of its own.
    """
    rollout = config.rollout
    actor = config.actor.layout
    said = _degrees(TrainLayout.build(actor, model))
    sizes = {"DP": rollout.data_parallel_size, "EP": rollout.expert_parallel_size}
    spread = "".join(f" {name} {size}" for name, size in sizes.items() if size > 1)
    engines = (
        f"{rollout.num_engines} engine{'s' if rollout.num_engines != 1 else ''} x TP "
        f"{rollout.tensor_model_parallel_size}{spread}"
    )
    critic = ""
    if config.of_critic is not None and config.critic.layout is not None:
        critic = f"its critic there ({_degrees(TrainLayout.build(config.critic.layout, model))}), "
    ranks = f"actor {actor.world_size} x {config.cluster.device}"
    return f"{ranks} ({said}), {critic}{engines}, {config.cluster.placement}"


def _degrees(layout: TrainLayout) -> str:
    degrees = {
        "TP": layout.tensor,
        "PP": layout.pipeline,
        "VPP": layout.virtual_pipeline,
        "CP": layout.context,
        "EP": layout.expert,
        "ETP": layout.expert_tensor,
        "DP": layout.data,
    }
    return ", ".join(f"{name} {size}" for name, size in degrees.items() if size > 1) or "not sharded"
