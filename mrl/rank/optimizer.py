"""Megatron's distributed Adam with its learning-rate schedule. A step never applies a gradient that is not finite."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from megatron.core import parallel_state as mpu
from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mrl.config.schema import OptimConfig
from mrl.errors import ConfigError
from mrl.rank.bridge import checked_overrides
from mrl.rank.offload import check_resident
from mrl.rank.parameter_marks import FROZEN, OF_TOWER


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step.

    `grad_norm` is the norm before clipping; `lr` is the rate that the step used.
    """

    applied: bool
    grad_norm: float
    lr: float


def build_optimizer(config: OptimConfig, chunks: list[torch.nn.Module], dtype: torch.dtype) -> MegatronOptimizer:
    """Makes the optimizer for wrapped chunks whose weights are loaded.

    Its float32 master weights are copied from them.
    """
    overrides = checked_overrides(
        "actor.optim.override_optimizer_config", config.override_optimizer_config, OptimizerConfig
    )
    values = {
        "optimizer": "adam",
        "lr": config.lr,
        "min_lr": config.min_lr,
        "weight_decay": config.weight_decay,
        "adam_beta1": config.betas[0],
        "adam_beta2": config.betas[1],
        "adam_eps": config.eps,
        "clip_grad": config.clip_grad,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": chunks[0].ddp_config.use_distributed_optimizer,
    }
    upstream = OptimizerConfig(**values | overrides)
    groups = get_standard_config_overrides(upstream) | {ParamKey(attr=FROZEN): {"wd_mult": 0.0}}
    if config.vision_lr is not None:  # it rises and falls as the others
        share = config.vision_lr / config.lr
        groups[ParamKey(attr=OF_TOWER)] = {"max_lr": config.vision_lr, "min_lr": share * config.min_lr}
    optimizer = get_megatron_optimizer(upstream, chunks, groups, use_gloo_process_groups=False)
    # Parameters without tensor-parallel mark count in the gradient norm on tensor rank 0 only, as copies. Experts on
    # different tensor ranks are not copies: they are other experts, or other optimizer shards. Only the rank inside
    # their own tensor group matters.
    for part in optimizer.chained_optimizers:
        if all(group.get("is_expert_parallel") for group in part.param_groups) and part.param_groups:
            part.tp_group = mpu.get_expert_tensor_parallel_group()
    return optimizer


def freeze(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Keeps parameters unchanged. It must be called before the optimizer is built.

    Their gradient is zero and they have no weight decay. So Adam leaves every bit while their moments are zero too.
    Moments of earlier updates would still move them, so a checkpoint's are not restored. They stay in buffers,
    optimizer and checkpoints. So freezing changes no layout: a run may freeze parameters that it trained before, or the
    reverse.
    """
    for parameter in parameters:
        parameter.register_hook(torch.zeros_like)
        setattr(parameter, FROZEN, True)


def build_scheduler(
    config: OptimConfig, optimizer: MegatronOptimizer, total_steps: int | None, section: str = "actor"
) -> OptimizerParamScheduler:
    """Makes the schedule, in optimizer steps: linear warm-up over `lr_warmup_steps`, then constant, or decay to
    `min_lr`.

    Step k (from 1) of a warm-up of W steps uses init + (lr - init) k / W, init being `lr_warmup_init`. The last step of
    the decay uses `min_lr`. A warm-up by `lr_warmup_steps_ratio` has that share of the decay's steps, rounded down;
    that of a run which goes on stays as it was (rank_load).

    `total_steps` is the length of the run, for a decay without a length of its own. `section` is the configuration
    section, for messages. Raises ConfigError when a length is needed and not known.
    """
    decay_steps = config.lr_decay_steps or total_steps
    needing = f"lr_decay_style={config.lr_decay_style}"
    if config.lr_warmup_steps_ratio:
        needing = f"lr_warmup_steps_ratio={config.lr_warmup_steps_ratio:g}"
    if decay_steps is None and (config.lr_decay_style != "constant" or config.lr_warmup_steps_ratio):
        raise ConfigError(
            f"{section}.optim.{needing} needs a length: set {section}.optim.lr_decay_steps (optimizer steps) or "
            "trainer.total_training_steps"
        )
    warmup_steps = config.lr_warmup_steps or int(config.lr_warmup_steps_ratio * (decay_steps or 0))
    if config.lr_decay_style == "constant":
        decay_steps = warmup_steps + 1  # not used by a constant rate, but must exceed the warm-up
    elif warmup_steps >= decay_steps:
        raise ConfigError(
            f"{section}.optim.lr_warmup_steps={warmup_steps} leaves nothing of the {decay_steps} decay "
            f"steps: allowed 0 to {decay_steps - 1}"
        )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr_warmup_init if warmup_steps else config.lr,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    scheduler.step(1)  # Megatron's first step would use the rate of step 0, which is 0 under a warm-up
    return scheduler


def zero_gradients(chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
    """Clears both places with gradients: the chunks' buffers and the optimizer's own references to them."""
    check_resident(
        "gradients", (b.grad_data for chunk in chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers))
    )
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()


@torch.no_grad()
def step(optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler) -> StepResult:
    """Clips and applies the gradients. Changes no weights, moments or schedule if the norm is not finite.

    The norm is summed over all ranks, so every rank takes the same branch.
    """
    check_resident(
        "the optimizer's part of the weights", (p for group in optimizer.param_groups for p in group["params"])
    )
    overflow = optimizer.prepare_grads()
    grad_norm = math.nan if overflow else float(optimizer.get_grad_norm())
    lr = current_lr(optimizer)
    if not math.isfinite(grad_norm):
        return StepResult(False, grad_norm, lr)
    for part in optimizer.chained_optimizers:
        parameters = []
        if not getattr(part, "is_stub_optimizer", False):
            parameters = part.get_parameters()
        if parameters and part.config.clip_grad > 0:
            clip_grad_by_total_norm_fp32(
                parameters, part.config.clip_grad, grad_norm, part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            )
    optimizer.step_with_ready_grads()
    scheduler.step(1)
    return StepResult(True, grad_norm, lr)


def current_lr(optimizer: MegatronOptimizer) -> float:
    """Returns the rate that the next step will use."""
    return float(next(group["lr"] for group in optimizer.param_groups if group.get("default_config", True)))
