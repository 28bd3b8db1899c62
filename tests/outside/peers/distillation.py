"""verl's forward KL over a teacher's likeliest words: value and gradient at the student's logits."""

from types import SimpleNamespace

import numpy as np
import torch
from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk

PEERS = ("verl", "torch")
TOKENS, WORDS = 4, 9


def cases() -> list[dict]:
    draw = np.random.default_rng(17)
    return [_case(draw) for _ in range(120)]


def _case(draw: np.random.Generator) -> dict:
    student, teacher = (np.round(float(draw.choice([0.5, 4.0])) * draw.normal(size=(TOKENS, WORDS)), 3) for _ in "st")
    topk = int(draw.integers(1, WORDS + 1))
    least = [None, -2.0, -10.0][int(draw.integers(3))]
    logits = torch.tensor(student, dtype=torch.float32, requires_grad=True)
    top_log_probs, words = torch.tensor(teacher, dtype=torch.float32).log_softmax(-1).topk(topk)
    nested = [torch.nested.as_nested_tensor([each], layout=torch.jagged) for each in (top_log_probs, words)]
    config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=least, use_chunked_topk=False))
    found = compute_forward_kl_topk(logits[None], *nested, config, "thd")
    # its caller bounds the losses below
    values = found["distillation_losses"][0].clamp_min(0.0)
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    return {
        "student": student.tolist(),
        "teacher": teacher.tolist(),
        "topk": topk,
        "least": least,
        "gave": {"loss": values.tolist(), "gradient": gradient.tolist()},
    }
