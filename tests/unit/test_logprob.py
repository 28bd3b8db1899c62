"""Log-probs and entropy from vocabulary-parallel logits are log_softmax's, in value and gradient, on one rank."""

import pytest
import torch
import torch.distributed as dist

from mrl.megatron.logprob import vocab_parallel_log_probs

BATCH, LENGTH, VOCAB, PADDED = 3, 5, 11, 14


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('store') / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(BATCH, LENGTH, PADDED, generator=generator)
    targets = torch.randint(VOCAB, (BATCH, LENGTH), generator=generator)
    temperature = torch.tensor([1.0, 0.5, 1.7])
    weights = torch.randn(2, BATCH, LENGTH, generator=generator)
    return logits, targets, temperature, weights


def oracle(logits, targets, temperature):
    distribution = (logits[..., :VOCAB].double() / temperature.double()[:, None, None]).log_softmax(-1)
    return distribution.gather(-1, targets[..., None])[..., 0], -(distribution.exp() * distribution).sum(-1)


def computed(logits, targets, temperature):
    return vocab_parallel_log_probs(logits, targets, temperature, VOCAB, dist.group.WORLD)


def test_values_are_those_of_log_softmax_over_the_real_vocabulary(case):
    logits, targets, temperature, _ = case
    logits[..., VOCAB:] = 100.0  # padding would take all probability if it were let in
    for found, expected in zip(computed(logits, targets, temperature), oracle(logits, targets, temperature), strict=True):
        assert found.dtype is torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("which", [(1.0, 0.0), (0.0, 1.0), (0.7, -0.3)], ids=["log_probs", "entropy", "both"])
def test_gradients_are_those_of_autograd_through_log_softmax(case, which):
    logits, targets, temperature, weights = case
    gradients = []
    for function in (computed, oracle):
        leaf = logits.clone().requires_grad_()
        outputs = function(leaf, targets, temperature)
        sum((c * w * o).sum() for c, w, o in zip(which, weights, outputs, strict=True)).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)
    assert torch.count_nonzero(gradients[0][..., VOCAB:]) == 0


def test_sixteen_bit_logits_are_computed_in_float32(case):
    logits, targets, temperature, _ = case
    half = logits.bfloat16()
    log_probs, entropy = computed(half, targets, temperature)
    exact = oracle(half, targets, temperature)
    torch.testing.assert_close(log_probs.double(), exact[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), exact[1], rtol=1e-6, atol=1e-6)


def test_a_certain_token_has_no_entropy_and_huge_logits_do_not_overflow():
    logits = torch.full((1, 1, VOCAB), -3e4)
    logits[..., 4] = 3e4
    log_probs, entropy = computed(logits, torch.tensor([[4]]), torch.ones(1))
    assert log_probs.item() == 0.0
    assert entropy.item() == 0.0
