"""Makes the parameters of the policy loss from a configuration."""

from mrl.algo.plain import PolicyLossParameters
from mrl.config.schema import AlgorithmConfig, DistillationConfig

_NO_TEACHER = DistillationConfig()


def loss_parameters(algorithm: AlgorithmConfig, distillation: DistillationConfig = _NO_TEACHER) -> PolicyLossParameters:
    """Returns the loss's name and constants. Loads a user's own loss, which may raise ConfigError."""
    loss = algorithm.policy_loss
    if loss.custom is not None:
        from mrl.algo.losses import load_custom_loss  # imports torch, which a driver needs for nothing else

        load_custom_loss(loss.custom.path, loss.loss_mode)
    return PolicyLossParameters(
        loss_mode=loss.loss_mode,
        loss_agg_mode=loss.loss_agg_mode,
        clip_ratio_low=loss.clip_ratio_low,
        clip_ratio_high=loss.clip_ratio_high,
        clip_ratio_c=loss.clip_ratio_c,
        loss_scale_factor=loss.loss_scale_factor,
        entropy_coeff=algorithm.entropy_coeff,
        kl_loss_coef=algorithm.kl_loss_coef if algorithm.use_kl_loss else 0.0,
        kl_loss_type=algorithm.kl_loss_type,
        dro_beta=loss.dro_beta,
        tau_pos=loss.tau_pos,
        tau_neg=loss.tau_neg,
        clip_cov_ratio=loss.clip_cov_ratio,
        clip_cov_lb=loss.clip_cov_lb,
        clip_cov_ub=loss.clip_cov_ub,
        kl_cov_ratio=loss.kl_cov_ratio,
        ppo_kl_coef=loss.ppo_kl_coef,
        distillation_coef=distillation.distillation_loss.distillation_loss_coef if distillation.in_loss else 0.0,
        distillation_mode=distillation.distillation_loss.loss_mode,
        distillation_clamp=distillation.distillation_loss.loss_max_clamp,
        distillation_log_prob_clamp=distillation.distillation_loss.log_prob_min_clamp,
        custom=loss.custom.parameters if loss.custom else {},
    )
