"""Products that a layer is made of: experts' grouped ones, attention over packs, the output layer's log-probs."""

import importlib.util
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from checks import Figures, Machine, check, expect

CUTLASS = "NVTE_USE_CUTLASS_GROUPED_GEMM"  # Transformer Engine reads it at every product


@check(fast=True, limit_s=120)
def grouped_products(machine: Machine) -> Figures:
    """TFLOP/s of the experts' product by how many experts and tokens there are: one by one (mrl's plain layer), torch's
    grouped one, and Transformer Engine's, of cuBLAS and of CUTLASS. Eight experts a token.
    """
    found: Figures = {}
    most = machine.size(32768, 64, "tokens")
    # of a layer's 128 experts all, or those of one of eight ranks
    for experts in (machine.size(128, 8), machine.size(16, 4)):
        for tokens in dict.fromkeys((machine.size(8192, 64), most // 2, most)):
            rows = [8 * tokens // experts] * experts
            of = f"of_{experts}" if tokens == machine.size(8192, 64) else f"of_{experts}_{tokens}_tokens"
            rates = _rates(machine, rows)
            found |= machine.part({f"{name}_{of}_tflops": rate for name, rate in rates.items()})
    return found


@check(fast=True, limit_s=90)
def grouped_parity(machine: Machine) -> Figures:
    """Outputs, gradients of inputs and of weights of each way, of uneven numbers of tokens with none among them, over
    the error of Hugging Face's products, one by one in the same dtype. Both against float64.
    """
    import torch

    found: Figures = {}
    for experts in (machine.size(16, 4), machine.size(128, 8)):
        noise = torch.Generator().manual_seed(0)
        share = torch.rand(experts, generator=noise).pow(3)
        rows = (share / share.sum() * machine.size(65536, 256, "rows")).long().div(16, rounding_mode="floor") * 16
        rows[1] = 0
        inputs = _Inputs(machine, rows.tolist(), noise)
        exact = inputs.one_by_one(torch.float64)
        theirs = _errors(inputs.one_by_one(machine.dtype), exact)
        for name, way in inputs.ways().items():
            over = [own / max(error, 1e-12) for own, error in zip(_errors(way(), exact), theirs, strict=True)]
            figures = dict(zip(("output", "input_gradient", "weight_gradient"), over, strict=True))
            found |= machine.part({f"{name}_of_{experts}_{part}_over_hf": value for part, value in figures.items()})
            worst = max(figures, key=figures.get)
            expect(figures[worst] < _OVER, f"{name} of {experts}: {worst} is off {figures[worst]:.2f} times as much as "
                   "products one by one")  # fmt: skip
    return found | machine.part({"without_tokens": _without_tokens(machine)})


_NO_ROWS = """
import sys, torch
sys.path[:0] = sys.argv[1:3]
from checks import Machine
from products import _Inputs
inputs = _Inputs(Machine(sys.argv[3]), [0] * 16)
for way in inputs.ways().values():
    way()
torch.cuda.synchronize() if sys.argv[3] == "cuda" else None
"""


def _without_tokens(machine: Machine) -> str:
    """How a process ends in which no expert gets a token (TransformerEngine#3037: CUTLASS' path took the process)."""
    here = Path(__file__).resolve().parent
    command = [sys.executable, "-c", _NO_ROWS, str(here), str(here.parents[1]), machine.device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return "ok" if done.returncode == 0 else f"ended with {done.returncode}: {last}"[:300]


_OVER = 1.1  # times the error of the products one by one


def _errors(found: list, exact: list) -> list[float]:
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]


class _Inputs:
    """Rows, weights and a gradient of the output, on the device."""

    def __init__(self, machine: Machine, rows: list[int], noise=None):
        import torch

        self.machine, self.rows = machine, rows
        self.width, self.hidden = machine.size(1536, 128), machine.size(2048, 256)

        def random(*shape: int):
            return torch.randn(shape, generator=noise).to(machine.torch_device, machine.dtype)

        self.x, self.out = random(sum(rows), self.hidden), random(sum(rows), self.width)
        self.weights = [random(self.width, self.hidden) * self.hidden**-0.5 for _ in rows]

    def one_by_one(self, dtype) -> list:
        import torch
        import torch.nn.functional as F

        def product(x, weights):
            return torch.cat([F.linear(part, w) for part, w in zip(x.split(self.rows), weights, strict=True)])

        return self._run(product, [w.to(dtype, copy=True).requires_grad_() for w in self.weights], dtype)

    def _run(self, product, weights: list, dtype) -> list:
        """Output, gradient of the inputs, and of all weights."""
        import torch

        x = self.x.to(dtype, copy=True).requires_grad_()
        out = product(x, weights)
        out.backward(self.out.to(dtype))
        return [out.detach(), x.grad, torch.stack([torch.zeros_like(w) if w.grad is None else w.grad for w in weights])]

    def ways(self) -> dict:
        """Each way of computing them, of those that are here."""
        import torch

        ways = {}
        if self.machine.dtype is torch.bfloat16:  # no other has one
            ways["torch_grouped"] = self._torch_grouped
        if not self.machine.small and importlib.util.find_spec("transformer_engine"):
            ways["transformer_engine"] = lambda: self._transformer_engine("0")
            ways["cutlass"] = lambda: self._transformer_engine("1")
        return ways or {"again": lambda: self.one_by_one(self.machine.dtype)}

    def _torch_grouped(self) -> list:
        import torch

        ends = torch.tensor(self.rows, device=self.x.device).cumsum(0).to(torch.int32)

        def product(x, weights):
            return torch._grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

        return self._run(product, [w.clone().requires_grad_() for w in self.weights], self.machine.dtype)

    def _transformer_engine(self, cutlass: str) -> list:
        layer = _grouped_linear(self.weights, self.x.dtype)
        parameters = [getattr(layer, f"weight{number}") for number in range(len(self.weights))]
        with _cutlass(cutlass):
            return self._run(lambda x, _: layer(x, self.rows), parameters, self.machine.dtype)


@contextmanager
def _cutlass(value: str):
    known = os.environ.get(CUTLASS)
    os.environ[CUTLASS] = value
    try:
        yield
    finally:
        os.environ.pop(CUTLASS) if known is None else os.environ.update({CUTLASS: known})


def _rates(machine: Machine, rows: list[int]) -> Figures:
    import torch
    import torch.nn.functional as F

    inputs = _Inputs(machine, rows)
    x, weights = inputs.x, inputs.weights
    ways = {"one_by_one": lambda: torch.cat([F.linear(a, w) for a, w in zip(x.split(rows), weights, strict=True)])}
    if machine.dtype is torch.bfloat16 and hasattr(torch, "_grouped_mm"):
        ends = torch.tensor(rows, device=x.device).cumsum(0).to(torch.int32)
        stacked = torch.stack(weights).transpose(1, 2)
        ways["torch_grouped"] = lambda: torch._grouped_mm(x, stacked, offs=ends)
    kinds = dict.fromkeys(ways, "0")
    if not machine.small and importlib.util.find_spec("transformer_engine"):
        layer = _grouped_linear(weights, x.dtype)
        ways["transformer_engine"] = ways["cutlass"] = lambda: layer(x, rows)
        kinds |= {"transformer_engine": "0", "cutlass": "1"}
    expected = ways["one_by_one"]().float()
    rates, flops = {}, 2.0 * sum(rows) * x.shape[1] * inputs.width
    for name, way in ways.items():
        with _cutlass(kinds[name]):
            error = ((way().float() - expected).norm() / expected.norm()).item()
            expect(error < 1e-2, f"{name}: off by {error:.2g} of the norm from the products one by one")
            rates[name] = flops / machine.seconds(way, repeats=3) / 1e12
    return rates


def _grouped_linear(weights, dtype):
    import torch
    from transformer_engine.pytorch import GroupedLinear

    out_features, in_features = weights[0].shape
    device = weights[0].device
    layer = GroupedLinear(len(weights), in_features, out_features, bias=False, params_dtype=dtype, device=device)
    with torch.no_grad():
        for number, weight in enumerate(weights):
            getattr(layer, f"weight{number}").copy_(weight)
    return layer


@check(fast=True)
def log_probs(machine: Machine) -> Figures:
    """Log-probs without the logits beside those through all logits: error against float64, time and memory, backward
    too.

    Both multiply in 16 bits; the lean ones must not be further from float64, in less memory.
    """
    import torch
    import torch.distributed as dist

    from mrl.rank.logprob import head_gradient_text, lean_log_probs

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
    return found | {"tokens": tokens, "words": words, "weight_gradient": head_gradient_text(weight)}


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
