"""Policy losses, KL estimators and value loss of verl, OpenRLHF and TRL over drawn micro-batches: value and gradient.

Numbers of a case are rows of tokens; the gradient is that of the log-probs (or values) at the tokens of the mask.
"""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import numpy as np
import openrlhf
import torch
from trl.trainer.grpo_trainer import GRPOTrainer
from verl.trainer.ppo.core_algos import compute_value_loss, get_policy_loss_fn, kl_penalty
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

# OpenRLHF's package of models imports what only a GPU has; its losses are plain torch
sys.modules["deepspeed"] = ModuleType("deepspeed")
sys.modules["openrlhf.models"] = ModuleType("openrlhf.models")
sys.modules["openrlhf.models"].__path__ = [f"{openrlhf.__path__[0]}/models"]
from openrlhf.models.loss import PolicyLoss  # noqa: E402

PEERS = ("verl", "openrlhf", "trl", "torch")
ROWS, WIDTH = 3, 5
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
SCALE = 8.0
# bounds that a spread of log ratios between 0.001 and 0.6 reaches on both sides
CLIPS = ((3e-4, 4e-4), (0.05, 0.08), (0.2, 0.28))
VERL_LOSSES = ("vanilla", "gspo", "sapo", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov")
OWN_MEAN = {"sapo", "geo_mean"}  # losses that verl averages over sequences, whatever the aggregation
KL_NAMES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "abs+", "k3+", "low_var_kl+")


def cases() -> list[dict]:
    draw = np.random.default_rng(7)
    return [
        *(_verl(draw, loss) for loss in VERL_LOSSES for _ in range(100)),
        *(_verl(draw, "gspo") for _ in range(200)),
        *(_openrlhf(draw) for _ in range(120)),
        *(_trl(draw) for _ in range(160)),
        *(_kl(draw, name) for name in KL_NAMES for _ in range(8)),
        *(_value(draw) for _ in range(60)),
        *_further(np.random.default_rng(8)),
    ]


def _further(draw: np.random.Generator) -> Iterator[dict]:
    """Cases that came later, of a draw of their own: the sum over tokens, and DRO."""
    for loss in ("vanilla", "cispo", "clip_cov", "gspo"):
        for _ in range(10):
            yield _verl(draw, loss, ("token-sum",))
    for _ in range(100):
        yield _verl(draw, "dro", (*AGGREGATIONS, "token-sum"))


def _batch(draw: np.random.Generator) -> dict:
    """Log-probs, advantages of responses or of tokens, a ragged mask with holes, and weights of one of four kinds."""
    shape = (ROWS, WIDTH)
    old = np.round(-draw.exponential(1.0, shape) - 0.02, 2)
    spread = float(draw.choice([1e-3, 0.1, 0.6]))
    new = np.minimum(old + np.round(spread * draw.normal(size=shape), 4), -0.01)
    mask = np.arange(WIDTH) < draw.integers(1, WIDTH + 1, ROWS)[:, None]
    if draw.random() < 0.3:
        mask &= draw.random(shape) < 0.7
    mask[0, 0] = True
    of_tokens = bool(draw.random() < 0.4)
    advantages = draw.normal(size=shape if of_tokens else (ROWS, 1)) * np.ones(shape)
    kind = str(draw.choice(["none", "token", "icepop", "sequence"]))
    weights = np.exp(0.4 * draw.normal(size=(ROWS, 1) if kind == "sequence" else shape)) * np.ones(shape)
    if kind == "icepop":
        weights = np.where(np.abs(np.log(weights)) > 0.4, 0.0, weights)
    columns = {"log_probs": new, "old_log_probs": old, "advantages": np.round(advantages, 2)}
    if kind != "none":
        columns["weights"] = np.round(weights, 2)
    return {
        "kind": kind,
        "of_tokens": of_tokens,
        "mask": mask.astype(int).tolist(),
        **{name: np.round(values, 5).tolist() for name, values in columns.items()},
    }


def _ties(case: dict) -> bool:
    mask = np.array(case["mask"], bool)
    a, p = (np.array(case[name])[mask] for name in ("advantages", "log_probs"))
    return len(np.unique(np.round((a - a.mean()) * (p - p.mean()), 9))) < mask.sum()


def _tensors(case: dict) -> SimpleNamespace:
    names = ("log_probs", "old_log_probs", "advantages")
    made = SimpleNamespace(**{name: torch.tensor(case[name], dtype=torch.float64) for name in names})
    made.mask = torch.tensor(case["mask"], dtype=torch.bool)
    made.weights = torch.tensor(case["weights"], dtype=torch.float64) if "weights" in case else None
    made.log_probs.requires_grad_()
    return made


def _gave(loss: torch.Tensor, variable: torch.Tensor, mask: torch.Tensor) -> dict:
    (gradient,) = torch.autograd.grad(loss, variable)
    return {"loss": loss.item(), "gradient": gradient[mask].tolist()}


def _verl(draw: np.random.Generator, loss: str, aggregations: tuple[str, ...] = AGGREGATIONS) -> dict:
    case = _batch(draw)
    # a single 0 in a geometric mean is refused here; of equal covariances verl takes the first, and we take both
    while (loss == "geo_mean" and case["kind"] == "icepop") or (loss == "kl_cov" and _ties(case)):
        case = _batch(draw)
    low, high = CLIPS[int(draw.integers(len(CLIPS)))]
    aggregation = str(draw.choice(aggregations))
    if loss in OWN_MEAN:
        aggregation = "seq-mean-token-mean"
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=2.0,
        tau_pos=1.0,
        tau_neg=1.05,
        # every token of a covariance between the two bounds, so that no chance is in the choice
        policy_loss=PolicyLossConfig(
            loss_mode=loss,
            clip_cov_ratio=1.0,
            clip_cov_lb=0.1,
            clip_cov_ub=2.0,
            kl_cov_ratio=0.25,
            ppo_kl_coef=0.3,
            dro_beta=0.05,
        ),
    )
    if aggregation == "seq-mean-token-sum-norm":
        config.global_batch_info["loss_scale_factor"] = SCALE
    given = _tensors(case)
    value, metrics = get_policy_loss_fn(loss)(
        given.old_log_probs, given.log_probs, given.advantages, given.mask, aggregation, config, given.weights
    )
    gave = _gave(value, given.log_probs, given.mask)
    if loss in ("vanilla", "gspo", "cispo"):
        gave["clipped"] = metrics["actor/pg_clipfrac"]
    return case | {"peer": "verl", "loss_mode": loss, "aggregation": aggregation, "clip": [low, high], "gave": gave}


def _openrlhf(draw: np.random.Generator) -> dict:
    """PPO and GSPO, and its correction (IcePop: level token, mode mask; or clipped weights)."""
    case = _batch(draw)
    kind = str(draw.choice(["ppo", "gspo", "mask", "clip"]))
    case.pop("weights", None)
    by_token = kind != "gspo" and bool(draw.random() < 0.5)
    low, high = CLIPS[int(draw.integers(len(CLIPS)))]
    given = _tensors(case)
    case["rollout_log_probs"] = np.round(case["old_log_probs"] + 0.4 * draw.normal(size=(ROWS, WIDTH)), 3).tolist()
    function = PolicyLoss(
        low,
        high,
        dual_clip=None if kind == "gspo" else 2.0,
        token_level_loss=by_token,
        policy_loss_type="gspo" if kind == "gspo" else "ppo",
        is_correction_level="token" if kind in ("mask", "clip") else "off",
        is_correction_mode=kind if kind in ("mask", "clip") else "mask",
        is_correction_threshold=[0.7, 1.6],
    )
    rollout = torch.tensor(case["rollout_log_probs"], dtype=torch.float64)
    mask = given.mask.double()
    value = function(given.log_probs, given.old_log_probs, given.advantages, mask, rollout)[0]
    aggregation = "token-mean" if by_token else "seq-mean-token-mean"
    gave = _gave(value, given.log_probs, given.mask)
    return case | {"peer": "openrlhf", "kind": kind, "aggregation": aggregation, "clip": [low, high], "gave": gave}


def _trl(draw: np.random.Generator) -> dict:
    """GRPO's clip, sequence ratios, CISPO and SAPO, with and without weights of the gap to the engine."""
    case = _batch(draw)
    while not np.array(case["mask"]).any(1).all():  # TRL counts empty responses, verl and we do not
        case = _batch(draw)
    case["advantages"] = [[row[0]] * WIDTH for row in case["advantages"]]
    case["of_tokens"] = False
    loss = str(draw.choice(["vanilla", "gspo", "cispo", "sapo"]))
    by_token = loss in ("vanilla", "cispo") and bool(draw.random() < 0.5)
    low, high = CLIPS[int(draw.integers(len(CLIPS)))]
    types = {"vanilla": "bnpo" if by_token else "grpo", "gspo": "grpo", "cispo": "cispo", "sapo": "sapo"}
    given = _tensors(case)
    tokens = given.mask.sum()
    bounds = {"epsilon_low": low, "epsilon_high": 1 + high if loss == "cispo" else high}
    trainer = SimpleNamespace(
        **bounds,
        args=SimpleNamespace(delta=None, sapo_temperature_pos=1.0, sapo_temperature_neg=1.25),
        beta=0.0,
        loss_type=types[loss],
        importance_sampling_level="sequence" if loss == "gspo" else "token",
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=given.weights is not None,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x),
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": _Lists()},
        _get_per_token_logps_and_entropies=lambda *_, **__: (given.log_probs, torch.zeros(ROWS, WIDTH), None),
    )
    trainer.args.steps_per_generation = 1
    ids = torch.ones(ROWS, WIDTH, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": given.mask.double(),
        "advantages": given.advantages[:, 0],
        "old_per_token_logps": given.old_log_probs,
        "num_items_in_batch": tokens,
    }
    if given.weights is not None:
        inputs["importance_sampling_ratio"] = given.weights
    value = GRPOTrainer._compute_loss(trainer, None, inputs)
    aggregation = "token-mean" if by_token or loss == "cispo" else "seq-mean-token-mean"
    gave = _gave(value, given.log_probs, given.mask)
    return case | {"peer": "trl", "loss_mode": loss, "aggregation": aggregation, "clip": [low, high], "gave": gave}


class _Lists(dict):
    def __missing__(self, name: str) -> list:
        self[name] = []
        return self[name]


def _kl(draw: np.random.Generator, name: str) -> dict:
    new = np.round(-draw.exponential(1.0, 6) - 0.02, 5)
    ref = np.round(new + float(draw.choice([0.01, 1.0, 8.0])) * draw.normal(size=6), 5)
    log_probs = torch.tensor(new, requires_grad=True)
    values = kl_penalty(log_probs, torch.tensor(ref), name)
    gave = {"values": values.tolist(), "gradient": torch.autograd.grad(values.sum(), log_probs)[0].tolist()}
    return {"peer": "verl", "kl": name, "log_probs": new.tolist(), "ref_log_probs": ref.tolist(), "gave": gave}


def _value(draw: np.random.Generator) -> dict:
    case = _batch(draw)
    shape = (ROWS, WIDTH)
    old = np.round(draw.normal(size=shape), 2)
    values = np.round(old + 0.3 * draw.normal(size=shape), 3)
    returns = np.round(draw.normal(size=shape), 3)
    aggregation = str(draw.choice(["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]))
    mask = torch.tensor(case["mask"], dtype=torch.bool)
    variable = torch.tensor(values, requires_grad=True)
    loss, clipped = compute_value_loss(variable, torch.tensor(returns), torch.tensor(old), mask, 0.2, aggregation)
    gave = _gave(loss, variable, mask) | {"clipped": clipped.item()}
    columns = {"values": values, "old_values": old, "returns": returns}
    return {
        "peer": "verl",
        "value": aggregation,
        "mask": case["mask"],
        **{name: column.tolist() for name, column in columns.items()},
        "gave": gave,
    }
