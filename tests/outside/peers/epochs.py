"""verl's order of rows in the epochs of an update, and its controllers of the KL in the reward."""

from types import SimpleNamespace

import numpy as np
import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_kl_controller
from verl.utils.tensordict_utils import make_iterator

PEERS = ("verl", "tensordict", "torch")


def cases() -> list[dict]:
    draw = np.random.default_rng(11)
    return [
        *(_order(draw, shuffle) for shuffle in (False, True) for _ in range(40)),
        *(_control(draw, kind) for kind in ("fixed", "adaptive") for _ in range(60)),
    ]


def _order(draw: np.random.Generator, shuffle: bool) -> dict:
    """The rows of each mini-batch, one epoch after the other."""
    mini = int(draw.integers(1, 7))
    rows = mini * int(draw.integers(1, 6))
    epochs = int(draw.integers(1, 5))
    given = TensorDict({"row": torch.arange(rows)}, batch_size=[rows])
    asked = {"shuffle": shuffle}
    parts = make_iterator(given, mini, epochs, seed=int(draw.integers(1000)), dataloader_kwargs=asked)
    gave = [part["row"].tolist() for part in parts]
    return {"what": "order", "rows": rows, "mini": mini, "epochs": epochs, "shuffle": shuffle, "gave": gave}


def _control(draw: np.random.Generator, kind: str) -> dict:
    """The coefficient of each step, and that after the last, as a run with these KLs has them."""
    settings = {
        "type": kind,
        "kl_coef": float(draw.choice([0.001, 0.01, 0.2])),
        "target_kl": float(draw.choice([0.01, 0.1, 6.0])),
        "horizon": int(draw.choice([100, 1000, 10000])),
    }
    controller = get_kl_controller(SimpleNamespace(**settings))
    samples = int(draw.choice([8, 512, 4096]))
    kls = (draw.exponential(settings["target_kl"], 12) * draw.choice([-1, 1, 1, 1], 12)).tolist()
    gave = [controller.value]
    for kl in kls:
        controller.update(current_kl=kl, n_steps=samples)
        gave.append(float(controller.value))
    return {"what": "control", "settings": settings, "samples": samples, "kls": kls, "gave": gave}
