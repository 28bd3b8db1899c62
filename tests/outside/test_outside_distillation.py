"""The forward KL over a teacher's likeliest words is verl's, value and gradient."""

import numpy as np
import torch
from golden import golden

from mrl.algo.losses import forward_kl_over_top_k


def test_the_forward_kl_over_words_is_verls():
    cases = golden("distillation")
    assert len(cases) == 120 and {case["least"] for case in cases} == {None, -2.0, -10.0}
    for case in cases:
        student, teacher = (torch.tensor(case[name], dtype=torch.float64) for name in ("student", "teacher"))
        student.requires_grad_()
        top_log_probs, words = teacher.log_softmax(-1).topk(case["topk"])
        found = forward_kl_over_top_k(student.log_softmax(-1).gather(-1, words), top_log_probs, case["least"])
        (gradient,) = torch.autograd.grad(found.sum(), student)
        np.testing.assert_allclose(found.detach(), case["gave"]["loss"], rtol=2e-5, atol=2e-6)  # verl's is float32
        np.testing.assert_allclose(gradient, case["gave"]["gradient"], rtol=2e-5, atol=2e-6)
