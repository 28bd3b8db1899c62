"""Log-probs and entropy made block by block of logits are log_softmax's, in value and gradient, on one rank."""

import pytest
import torch
import torch.distributed as dist

from mrl.platforms.process_memory import give_back_heap, peak_resident_bytes, reset_peak_resident, resident_bytes
from mrl.rank import logprob
from mrl.rank.logprob import REDUCES_EARLY, lean_log_probs, top_tokens
from mrl.units import MIB

TOKENS, HIDDEN, VOCAB, PADDED = 15, 6, 11, 14
BLOCKS = [(1, VOCAB), (4, VOCAB), (15, 4), (4, 5), (6, 1), None]  # tokens and rows of the vocabulary at a time


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path_factory.mktemp('store') / 'rendezvous'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    hidden = 2 * torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, generator=generator)
    weight[VOCAB:] = 100.0  # padding would take all probability if it were let in
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    temperature = 0.5 + torch.rand(TOKENS, generator=generator)
    return hidden, weight, targets, temperature, torch.randn(2, TOKENS, generator=generator)


def oracle(hidden, weight, targets, temperature):
    logits = hidden.double() @ weight.double().t()
    distribution = (logits[:, :VOCAB] / temperature.double()[:, None]).log_softmax(-1)
    return distribution.gather(-1, targets[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)


def computed(hidden, weight, targets, temperature, block=None):
    return lean_log_probs(
        hidden, weight, targets, temperature, VOCAB, dist.group.WORLD, entropy_has_gradient=True, block=block
    )


SEVERAL = 3  # words of a token


@pytest.mark.parametrize("block", BLOCKS)
def test_several_words_of_a_token_have_their_log_probs_and_gradients(case, block):
    """Against autograd through log_softmax, the same word twice among them."""
    hidden, weight, _, temperature, _ = case
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(VOCAB, (TOKENS, SEVERAL), generator=generator)
    words[:, 2] = words[:, 0]
    weights = torch.randn(TOKENS, SEVERAL, generator=generator)

    def expected(hidden, weight):
        logits = hidden.double() @ weight.double().t()
        return (logits[:, :VOCAB] / temperature.double()[:, None]).log_softmax(-1).gather(-1, words)

    def found(hidden, weight):
        return computed(hidden, weight, words, temperature, block)[0]

    results = []
    for function in (found, expected):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        values = function(*leaves)
        gradients = torch.autograd.grad((values * weights).sum(), leaves)
        results.append([values.detach().double(), *(g.double() for g in gradients)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("below", [VOCAB, 5])
@pytest.mark.parametrize("block", BLOCKS)
def test_the_likeliest_words_are_those_of_the_whole_distribution(case, block, below):
    hidden, weight, _, temperature, _ = case
    ids, log_probs = top_tokens(hidden, weight, temperature, VOCAB, dist.group.WORLD, 4, below, block)
    logits = hidden.double() @ weight.double().t()
    distribution = (logits[:, :VOCAB] / temperature.double()[:, None]).log_softmax(-1)
    best = distribution[:, :below].topk(4, -1)
    assert torch.equal(ids, best.indices)
    torch.testing.assert_close(log_probs.double(), best.values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", BLOCKS)
def test_values_are_those_of_log_softmax_over_the_real_vocabulary(case, block):
    for found, expected in zip(computed(*case[:4], block), oracle(*case[:4]), strict=True):
        assert found.dtype is torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("which", [(1.0, 0.0), (0.0, 1.0), (0.7, -0.3)], ids=["log_probs", "entropy", "both"])
@pytest.mark.parametrize("block", BLOCKS)
def test_gradients_are_those_of_autograd_through_log_softmax(case, block, which):
    hidden, weight, targets, temperature, weights = case
    gradients = []
    for function in (lambda *given: computed(*given, block), oracle):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        outputs = function(*leaves, targets, temperature)
        sum((c * w * o).sum() for c, w, o in zip(which, weights, outputs, strict=True)).backward()
        gradients.append([leaf.grad for leaf in leaves])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.count_nonzero(gradients[0][1][VOCAB:]) == 0


def test_without_a_gradient_of_the_entropy_the_one_of_the_log_probs_is_the_same(case):
    hidden, weight, targets, temperature, weights = case
    gradients = []
    for entropy_has_gradient in (True, False):
        leaf = hidden.clone().requires_grad_()
        log_probs, entropy = lean_log_probs(
            leaf, weight, targets, temperature, VOCAB, dist.group.WORLD, entropy_has_gradient
        )
        assert entropy.requires_grad == entropy_has_gradient
        (weights[0] * log_probs).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_the_weight_gradient_is_added_to_the_buffer_of_a_weight_that_has_one(case):
    hidden, weight, targets, temperature, weights = case
    plain, buffered = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    buffered.main_grad = torch.ones_like(weight)
    for leaf in (plain, buffered):
        (weights[0] * computed(hidden, leaf, targets, temperature, (4, 5))[0]).sum().backward()
    assert buffered.grad is None
    torch.testing.assert_close(buffered.main_grad, 1 + plain.grad, rtol=1e-6, atol=1e-6)


def test_beside_a_buffer_in_sixteen_bits_the_gradient_is_rounded_once(case):
    """It is what a buffer in float32 would get, rounded: Megatron adds it to its own, once a micro-batch."""
    hidden, weight, targets, temperature, weights = case
    gradients = {}
    for dtype in (torch.float32, torch.bfloat16):
        leaf = weight.bfloat16().requires_grad_()
        leaf.main_grad = torch.zeros_like(leaf, dtype=dtype)
        setattr(leaf, REDUCES_EARLY, True)
        (weights[0] * computed(hidden.bfloat16(), leaf, targets, temperature, (4, 5))[0]).sum().backward()
        gradients[dtype] = leaf
    whole, half = gradients[torch.float32].main_grad, gradients[torch.bfloat16]
    assert torch.count_nonzero(half.main_grad) == 0 and torch.count_nonzero(whole) == VOCAB * HIDDEN
    assert torch.equal(half.grad, whole.bfloat16())


def test_a_weight_that_is_reduced_early_gets_a_gradient_of_zeros_beside_its_buffer(case):
    """Megatron reduces a buffer once each of its weights has a gradient, and adds that to what is in the buffer."""
    hidden, weight, targets, temperature, weights = case
    plain, early = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    early.main_grad, _ = torch.zeros_like(weight), setattr(early, REDUCES_EARLY, True)
    for leaf in (plain, early):
        (weights[0] * computed(hidden, leaf, targets, temperature, (4, 5))[0]).sum().backward()
    assert torch.equal(early.grad, torch.zeros_like(weight))
    torch.testing.assert_close(early.main_grad, plain.grad, rtol=1e-6, atol=1e-6)


def test_sixteen_bit_logits_are_reduced_in_float32(case):
    hidden, weight, targets, temperature, _ = case
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    logits = (hidden @ weight.t()).double()[:, :VOCAB] / temperature.double()[:, None]
    log_probs, entropy = computed(hidden, weight, targets, temperature, (4, 5))
    distribution = logits.log_softmax(-1)
    torch.testing.assert_close(
        log_probs.double(), distribution.gather(-1, targets[:, None])[:, 0], rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(entropy.double(), -(distribution.exp() * distribution).sum(-1), rtol=1e-5, atol=1e-6)


def test_sixteen_bit_weight_gradients_lose_nothing_between_chunks(case):
    """Against float64 with the same 16-bit weights and states: what each chunk adds is not rounded to 16 bits."""
    _, _, targets, temperature, weights = case
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (
        torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16(),
        torch.randn(PADDED, HIDDEN, generator=generator).bfloat16(),
    )
    trained = weight.clone().requires_grad_()
    trained.main_grad = torch.zeros(PADDED, HIDDEN)
    (weights[0] * computed(hidden, trained, targets, temperature, block=(2, 3))[0]).sum().backward()
    # the function takes logits as 16 bits, so its probabilities are those of rounded logits
    logits = (hidden @ weight.t()).double()[:, :VOCAB] / temperature.double()[:, None]
    slope = (torch.nn.functional.one_hot(targets, VOCAB) - logits.softmax(-1)) * (weights[0] / temperature).double()[
        :, None
    ]
    torch.testing.assert_close(trained.main_grad[:VOCAB].double(), slope.t() @ hidden.double(), rtol=1e-5, atol=1e-5)


def test_a_device_is_asked_for_the_product_not_by_its_name(case, monkeypatch):
    """torch_npu's transfer_to_npu, which MindSpeed imports, makes `is_cuda` true of NPU tensors, and it has no such
    product.
    """
    hidden, weight, targets, temperature, weights = case
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    trained = weight.bfloat16().requires_grad_()
    (weights[0] * computed(hidden.bfloat16(), trained, targets, temperature, block=(4, 5))[0]).sum().backward()
    assert torch.count_nonzero(trained.grad[:VOCAB]) == VOCAB * HIDDEN


@pytest.mark.parametrize("block", [None, (4, VOCAB), (4, 5)])
def test_where_both_products_take_sixteen_bits_their_gradient_is_rounded_once(case, block, monkeypatch):
    """As on CUDA, which writes a product of 16-bit factors in float32: stood in for by products in float32."""

    def written(into, left, right, out_dtype, out):
        return out.copy_(into + left.float() @ right.float())

    monkeypatch.setattr(logprob, "_writes_float32", lambda device, dtype: dtype is torch.bfloat16)
    monkeypatch.setattr(torch, "addmm", written)
    hidden, weight, targets, temperature, (of_log_probs, _) = case
    low = [each.bfloat16().requires_grad_() for each in (hidden, weight)]
    exact = [each.detach().double().requires_grad_() for each in low]
    for (states, matrix), function in ((low, computed), (exact, oracle)):
        blocks = {"block": block} if function is computed else {}
        values, _ = function(states, matrix, targets, temperature, **blocks)
        (values * of_log_probs).sum().backward()
    for found, expected in zip(low, exact, strict=True):
        error = (found.grad.double() - expected.grad).norm() / expected.grad.norm()
        assert error < 1e-2  # logits, gradient and result are rounded to 8 bits


def test_on_cuda_the_product_of_sixteen_bit_factors_is_written_in_float32():
    """That overload is CUDA's alone, so here only that there is one, for what it is given."""
    schema = torch.ops.aten.addmm.dtype_out._schema
    assert [argument.name for argument in schema.arguments[:4]] == ["self", "mat1", "mat2", "out_dtype"]
    meta = [torch.empty(shape, device="meta", dtype=torch.bfloat16) for shape in ((3, 5), (5, 4))]
    into = torch.empty(3, 4, device="meta")
    assert torch.addmm(into, *meta, out_dtype=torch.float32).dtype is torch.float32


def test_a_certain_token_has_no_entropy_and_huge_logits_do_not_overflow():
    weight = torch.full((VOCAB, 1), -3e4)
    weight[4] = 3e4
    log_probs, entropy = lean_log_probs(
        torch.ones(1, 1), weight, torch.tensor([4]), torch.ones(1), VOCAB, dist.group.WORLD
    )
    assert log_probs.item() == 0.0
    assert entropy.item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_held_at_once_does_not_grow_with_the_number_of_blocks(dtype):
    """A hundred blocks of 1 MiB: a handful of them, not one that is freed under each result that stays."""
    tokens, rows = 256, 1024
    _value_and_gradient(tokens, rows, blocks=2, dtype=dtype)  # the first products load kernels of tens of MiB
    give_back_heap()
    before = resident_bytes()
    reset_peak_resident()
    _value_and_gradient(tokens, rows, blocks=100, dtype=dtype)
    assert peak_resident_bytes() - before < 20 * MIB


def _value_and_gradient(tokens: int, rows: int, blocks: int, dtype: torch.dtype) -> None:
    hidden, weight = torch.ones(tokens, 4, dtype=dtype).requires_grad_(), torch.ones(blocks * rows, 4, dtype=dtype)
    targets, temperature = torch.zeros(tokens, dtype=int), torch.ones(tokens)
    log_probs, _ = lean_log_probs(
        hidden, weight, targets, temperature, len(weight), dist.group.WORLD, block=(tokens, rows)
    )
    log_probs.sum().backward()


def test_no_tokens_are_no_fault():
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    log_probs, _ = lean_log_probs(
        hidden, torch.zeros(PADDED, HIDDEN), torch.zeros(0, dtype=int), torch.zeros(0), VOCAB, dist.group.WORLD
    )
    log_probs.sum().backward()
    assert hidden.grad.shape == (0, HIDDEN)
