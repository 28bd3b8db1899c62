"""Products that a layer is made of: experts' grouped ones, attention over packs, the output layer's log-probs."""

import importlib.util

from checks import Figures, Machine, check, expect


@check(fast=True)
def grouped_products(machine: Machine) -> Figures:
    """TFLOP/s of the experts' product, one by one (mrl's plain layer), as torch's grouped one and as Transformer
    Engine's.
    """
    # of a layer's 128 experts all, or those of one of eight ranks
    shapes = ((machine.size(128, 8), machine.size(512, 32)), (machine.size(16, 4), machine.size(4096, 64)))
    return {
        f"{name}_of_{experts}_tflops": rate
        for experts, tokens in shapes
        for name, rate in _rates(machine, experts, tokens).items()
    }


def _rates(machine: Machine, experts: int, tokens_each: int) -> Figures:
    import torch
    import torch.nn.functional as F

    width, hidden = machine.size(1536, 128), machine.size(2048, 256)
    tokens = [tokens_each] * experts
    dtype, device = machine.dtype, machine.torch_device
    x = torch.randn(sum(tokens), hidden, device=device).to(dtype)
    weights = [torch.randn(width, hidden, device=device).to(dtype) * hidden**-0.5 for _ in range(experts)]
    ways = {
        "one_by_one": lambda: torch.cat([F.linear(part, w) for part, w in zip(x.split(tokens), weights, strict=True)])
    }
    if dtype is torch.bfloat16 and hasattr(torch, "_grouped_mm"):
        ends = torch.tensor(tokens, device=device).cumsum(0).to(torch.int32)
        stacked = torch.stack(weights).transpose(1, 2)
        ways["torch_grouped"] = lambda: torch._grouped_mm(x, stacked, offs=ends)
    if not machine.small and importlib.util.find_spec("transformer_engine"):
        ways["transformer_engine"] = _grouped_linear(weights, x, tokens)
    expected = ways["one_by_one"]().float()
    for name, way in ways.items():
        error = ((way().float() - expected).norm() / expected.norm()).item()
        expect(error < 1e-2, f"{name}: off by {error:.2g} of the norm from the products one by one")
    flops = 2.0 * sum(tokens) * hidden * width
    return {name: flops / machine.seconds(way) / 1e12 for name, way in ways.items()}


def _grouped_linear(weights, x, tokens):
    import torch
    from transformer_engine.pytorch import GroupedLinear

    out_features, in_features = weights[0].shape
    layer = GroupedLinear(len(weights), in_features, out_features, bias=False, params_dtype=x.dtype, device=x.device)
    with torch.no_grad():
        for number, weight in enumerate(weights):
            getattr(layer, f"weight{number}").copy_(weight)
    return lambda: layer(x, tokens)


@check(fast=True)
def log_probs(machine: Machine) -> Figures:
    """Log-probs without the logits beside those through all logits: error against float64, time and memory, backward
    too.

    Both multiply in 16 bits; the lean ones must not be further from float64, in less memory.
    """
    import torch
    import torch.distributed as dist

    from mrl.rank.logprob import head_gradient_in_words, lean_log_probs

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tokens, hidden, words = machine.size(8192, 256), machine.size(2048, 128), machine.size(151936, 8192)
    noise = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=noise).to(machine.torch_device, torch.bfloat16).requires_grad_()
    weight = (
        (torch.randn(words, hidden, generator=noise) * 0.05).to(machine.torch_device, torch.bfloat16).requires_grad_()
    )
    targets = torch.randint(words, (tokens,), generator=noise).to(machine.torch_device)
    ones = torch.ones(tokens, device=machine.torch_device)
    ways = {
        "plain": lambda: torch.log_softmax((states @ weight.t()).float(), -1).gather(-1, targets[:, None])[:, 0],
        "lean": lambda: lean_log_probs(states, weight, targets, ones, words, dist.group.WORLD)[0],
    }
    few = slice(0, 64)
    exact = torch.log_softmax(states[few].double() @ weight.t().double(), -1).gather(-1, targets[few, None])[:, 0]
    errors = {name: (way()[few].double() - exact).abs().max().item() for name, way in ways.items()}
    expect(errors["lean"] <= 1.05 * errors["plain"], f"lean log-probs are off by {errors}, further than plain ones")

    def both(way):
        def run():
            states.grad = weight.grad = None
            way().sum().backward()

        return run

    found = {f"{name}_error": error for name, error in errors.items()}
    for name, way in ways.items():
        found |= {
            f"{name}_forward_s": machine.seconds(way, repeats=3),
            f"{name}_s": machine.seconds(both(way), repeats=3),
        }
        states.grad = weight.grad = None
        found |= {f"{name}_gib": machine.peak_of(both(way))}
    return found | {"tokens": tokens, "words": words, "weight_gradient": head_gradient_in_words(weight)}


@check(fast=True)
def attention(machine: Machine) -> Figures:
    """Plain attention over a pack: short and long sequences of one number of tokens, each as if it were alone."""
    import torch

    from mrl.rank.attention import CausalAttention

    heads, groups, size, total = machine.size(32, 4), machine.size(4, 2), machine.size(128, 32), machine.size(8192, 512)
    layer = CausalAttention(None, 1, None, "self", pg_collection=_OneRank())
    found = {}
    for name, length in (("short", total // 64), ("middle", total // 8), ("whole", total)):
        q, k, v = (
            torch.randn(total, n, size, device=machine.torch_device).to(machine.dtype) for n in (heads, groups, groups)
        )
        starts = torch.arange(0, total + 1, length, dtype=torch.int32, device=machine.torch_device)
        pack = _Pack(starts)
        out, last = layer(q, k, v, packed_seq_params=pack), slice(total - length, total)
        alone = layer(q[last], k[last], v[last], packed_seq_params=_Pack(starts[:2]))
        error = (out[last].float() - alone.float()).abs().max().item()
        expect(
            error < (1e-4 if machine.small else 2e-2),
            f"attention of a packed sequence is off by {error:.2g} from that alone",
        )
        pairs = total * (length + 1) / 2
        found[f"{name}_tflops"] = (
            4
            * heads
            * size
            * pairs
            / machine.seconds(lambda p=pack, x=(q, k, v): layer(*x, packed_seq_params=p))
            / 1e12
        )
    return found


class _Pack:
    """Of Megatron's PackedSeqParams what plain attention reads."""

    def __init__(self, starts):
        self.cu_seqlens_q_padded = starts


class _OneRank:
    """No context parallelism."""

    @property
    def cp(self):
        return self

    def size(self) -> int:
        return 1
