"""A pass forward only computes as in evaluation, and leaves the model as it found it."""

import pytest
import torch

from mrl.rank import forward


def test_log_probs_are_computed_without_what_only_training_does(monkeypatch):
    """A dropout of 1 would leave nothing; and an update after the pass trains again."""
    chunks = [torch.nn.Sequential(torch.nn.Dropout(1.0)) for _ in range(2)]
    seen = []

    def run(chunks, *_, **__):
        seen.extend((chunk(torch.ones(3)).sum().item(), torch.is_grad_enabled()) for chunk in chunks)

    monkeypatch.setattr(forward, "run_pass", run)
    forward.log_prob_pass(chunks, [], 1)
    assert seen == [(3.0, False)] * 2
    assert [module.training for chunk in chunks for module in chunk.modules()] == [True] * 4


def test_a_pass_that_fails_leaves_the_model_in_training(monkeypatch):
    def run(*_, **__):
        raise RuntimeError("lost")

    monkeypatch.setattr(forward, "run_pass", run)
    chunk = torch.nn.Dropout(1.0)
    with pytest.raises(RuntimeError, match="lost"):
        forward.log_prob_pass([chunk], [], 1)
    assert chunk.training
