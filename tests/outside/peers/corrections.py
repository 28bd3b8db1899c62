"""verl's rollout correction: weights and kept tokens of its options, over drawn batches."""

import numpy as np
import torch
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

PEERS = ("verl", "torch")
ROWS, WIDTH = 4, 6
BANDS = {
    "token": ("0.5_5.0", "0.8_1.25", "0.7_3.0"),
    "sequence": ("0.5_2.0", "0.6_5.0"),
    "token_k1": ("0.5_1.5", "0.7_1.25", "0.8_4.0", 2.0, "1.5"),
    "seq_sum_k1": ("0.5_1.5", "0.4_3.0", "0.8_2.0", 2.0),
    "seq_mean_k1": ("0.9_1.05", "0.8_1.5", "0.999_1.001", 1.1),
}
CAPS = (2.0, "3.0", 5.0)
OPTIONS = [
    *({"rollout_is": level, "rollout_is_threshold": cap} for level in ("token", "sequence") for cap in CAPS),
    *({"rollout_is": level, "rollout_is_threshold": band} for level in ("token", "sequence") for band in BANDS[level]),
    *({"rollout_rs": name, "rollout_rs_threshold": band} for name in BANDS if "k1" in name for band in BANDS[name]),
    # a weight and a rejection by the same ratio, up to a cap that no kept ratio reaches (verl's preset Seq-MIS)
    *(
        {"rollout_is": level, "rollout_is_threshold": cap, "rollout_rs": name, "rollout_rs_threshold": band}
        for level, name in (("token", "token_k1"), ("sequence", "seq_sum_k1"))
        for cap, band in ((2.0, "0.5_1.5"), (2.0, 2.0), (4.0, "0.4_3.0"))
    ),
    # a rejection by another ratio than the weights', or by the same one beyond their cap (verl's Geo-RS-Token-TIS)
    *(
        {"rollout_is": level, "rollout_is_threshold": cap, "rollout_rs": name, "rollout_rs_threshold": band}
        for level, cap, name, band in (
            ("token", 2.0, "seq_mean_k1", "0.99_1.001"),
            ("token", 2.0, "seq_mean_k1", "0.8_1.5"),
            ("sequence", 2.0, "seq_mean_k1", "0.9_1.05"),
            ("sequence", 3.0, "token_k1", "0.6_1.6"),
            ("token", "0.5_5.0", "seq_sum_k1", 2.0),
            ("token", 1.2, "token_k1", "0.5_1.5"),
        )
    ),
]


def cases() -> list[dict]:
    draw = np.random.default_rng(11)
    near = [_case(draw, options, (1e-3, 0.1, 0.5, 1.0)) for options in OPTIONS for _ in range(40)]
    # ratios of single tokens beyond verl's bound of e^20
    far = [_case(draw, options, (8.0, 15.0)) for options in OPTIONS for _ in range(20)]
    return [case | {"far": False} for case in near] + [case | {"far": True} for case in far]


def _case(draw: np.random.Generator, options: dict, spreads: tuple[float, ...]) -> dict:
    shape = (ROWS, WIDTH)
    rollout = np.round(-draw.exponential(1.0, shape) - 0.02, 2)
    spread = float(draw.choice(spreads))
    old = np.round(rollout + spread * draw.normal(size=shape), 4)
    mask = np.arange(WIDTH) < draw.integers(0, WIDTH + 1, ROWS)[:, None]
    mask &= (draw.random(shape) < 0.8) | (draw.random() < 0.5)
    # verl's own metrics of IcePop divide by zero where no weight is left
    mask[0, 0], old[0, 0], old[0, 1:] = True, rollout[0, 0], rollout[0, 1:]
    columns = (torch.tensor(old), torch.tensor(rollout), torch.tensor(mask.astype(np.float64)))
    weights, kept, _ = compute_rollout_correction_and_rejection_mask(*columns, **options)
    gave = {"kept": kept.int().tolist()}
    if weights is not None:
        gave["weights"] = weights.batch["rollout_is_weights"].float()[kept.bool()].tolist()
    return {
        "options": options,
        "old": old.tolist(),
        "rollout": rollout.tolist(),
        "mask": mask.astype(int).tolist(),
        "gave": gave,
    }
