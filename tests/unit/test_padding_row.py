"""The padding token's lookup has no gradient, as of torch.nn.Embedding with the same padding_idx."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

from mrl.rank.bridge import _keep_gradients_from_padding
from mrl.rank.padding_row import keep_gradients_from

WORDS, WIDTH, PADDING = 11, 6, 4
TOKENS = torch.tensor([[1, 4, 9, 4, 0, 1], [4, 7, 7, 10, 3, 4]])  # two rows, with padding in the middle and at the ends
DRAWN = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(WORDS, WIDTH, generator=DRAWN)
LOSS = torch.randn(*TOKENS.shape, WIDTH, generator=DRAWN)


@pytest.fixture(scope="module", autouse=True)
def alone():
    """A process group of one rank, which Megatron's embedding asks for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Scattered(torch.nn.Module):
    """Returns one rank's part of the sequence, as Megatron's embedding under sequence parallelism."""

    reduce_scatter_embeddings = True

    def __init__(self, rank: int):
        super().__init__()
        self.weight = torch.nn.Parameter(WEIGHT.clone())
        self.tp_group = SimpleNamespace(size=lambda: 2, rank=lambda: rank)

    def forward(self, tokens):
        return F.embedding(tokens, self.weight).transpose(0, 1).chunk(2)[self.tp_group.rank()]


def megatrons(rows: bool) -> VocabParallelEmbedding:
    """Megatron's embedding of one rank. `rows`: looked up by indexing, as with deterministic algorithms."""
    config = SimpleNamespace(
        deterministic_mode=rows, use_cpu_initialization=True, params_dtype=torch.float32, perform_initialization=False
    )
    embedding = VocabParallelEmbedding(WORDS, WIDTH, init_method=None, config=config, tp_group=dist.group.WORLD)
    embedding.weight.data.copy_(WEIGHT)
    return embedding


def of_torch() -> torch.Tensor:
    """The weight's gradient in torch's embedding, as transformers makes it."""
    embedding = torch.nn.Embedding(WORDS, WIDTH, PADDING, _weight=WEIGHT.clone())
    (embedding(TOKENS) * LOSS).sum().backward()
    assert not embedding.weight.grad[PADDING].any()
    return embedding.weight.grad


@pytest.mark.parametrize("rows", [False, True])
def test_gradients_are_torchs_and_values_the_stored_rows(rows):
    embedding = megatrons(rows)
    keep_gradients_from(embedding, PADDING)
    out = embedding(TOKENS)
    assert torch.equal(out, WEIGHT[TOKENS])
    (out * LOSS).sum().backward()
    torch.testing.assert_close(embedding.weight.grad, of_torch(), rtol=1e-6, atol=0)
    assert not embedding.weight.grad[PADDING].any()


def test_a_gradient_that_is_no_number_does_not_reach_the_row():
    embedding = megatrons(False)
    keep_gradients_from(embedding, PADDING)
    (embedding(TOKENS) * torch.where(TOKENS[..., None] == PADDING, float("nan"), LOSS)).sum().backward()
    torch.testing.assert_close(embedding.weight.grad, of_torch(), rtol=1e-6, atol=0)


def test_a_tied_row_keeps_the_output_layers_gradient():
    embedding = megatrons(False)
    keep_gradients_from(embedding, PADDING)
    logits = (embedding(TOKENS) * LOSS) @ embedding.weight.T
    logits.logsumexp(-1).sum().backward()
    tied = torch.nn.Embedding(WORDS, WIDTH, PADDING, _weight=WEIGHT.clone())
    ((tied(TOKENS) * LOSS) @ tied.weight.T).logsumexp(-1).sum().backward()
    torch.testing.assert_close(embedding.weight.grad, tied.weight.grad)
    assert embedding.weight.grad[PADDING].any()


def test_parts_of_the_sequence_give_torchs_gradient_together():
    parts = []
    for rank in range(2):
        embedding = Scattered(rank)
        keep_gradients_from(embedding, PADDING)
        (embedding(TOKENS) * LOSS.transpose(0, 1).chunk(2)[rank]).sum().backward()
        parts.append(embedding.weight.grad)
    torch.testing.assert_close(sum(parts), of_torch())
    assert not sum(parts)[PADDING].any()


def test_a_frozen_embedding_and_one_without_gradients_are_only_looked_up():
    embedding = megatrons(False).requires_grad_(False)
    keep_gradients_from(embedding, PADDING)
    assert torch.equal(embedding(TOKENS), WEIGHT[TOKENS])
    with torch.no_grad():
        assert torch.equal(megatrons(False)(TOKENS), WEIGHT[TOKENS])


def test_a_stage_without_a_lookup_is_left_alone():
    """The last stage of a tied model has the weight, but no `embedding`."""
    _keep_gradients_from_padding(PADDING, torch.nn.Linear(2, 2), pre_process=False, post_process=True)
    chunk = torch.nn.Module()
    chunk.embedding = torch.nn.Module()
    chunk.embedding.word_embeddings = megatrons(False)
    _keep_gradients_from_padding(PADDING, chunk, pre_process=True, post_process=True)
    (chunk.embedding.word_embeddings(TOKENS) * LOSS).sum().backward()
    assert not chunk.embedding.word_embeddings.weight.grad[PADDING].any()
