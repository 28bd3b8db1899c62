"""The gated delta rule at the width of Qwen3-Next: time and memory by the length of a pack, and by whose kernel."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from checks import Figures, Machine, Skip, check, expect

_LONGER = 2.5  # times as long for twice the tokens; what grows as the square of the tokens takes four times
# of the norm, in bfloat16: values and gradients of the inputs in it, then those that are sums over a head's width. The
# kernel multiplies rounded states; in float16, eight times as fine, its own tests allow 0.005, 0.008 and 0.02
_APART, _OF_SUMS = 0.02, 0.05
_EXACT = 1e-4  # in float32


@check(fast=True, limit_s=120)
def gated_delta_time(machine: Machine) -> Figures:
    """Seconds of a forward and a backward pass of one layer's rule, and GiB at most, with half, all and twice of 8 K
    tokens: it grows as the tokens do.
    """
    import torch

    from mrl.rank.gated_delta import gated_delta

    heads, dim = machine.size(32, 2, "heads"), machine.size(128, 16, "dim")
    most = machine.size(16384, 1024, "tokens")
    found: Figures = {}
    for tokens in (most // 4, most // 2, most):
        noise = torch.Generator(machine.torch_device).manual_seed(0)

        def random(*shape: int, noise: torch.Generator = noise) -> torch.Tensor:
            made = torch.randn(shape, generator=noise, device=machine.torch_device)
            return made.to(machine.dtype).requires_grad_()

        query, key, value = (random(tokens, heads, dim) for _ in range(3))
        decay, rate = (random(tokens, heads) for _ in range(2))

        def run(inputs: tuple = (query, key, value, decay, rate), tokens: int = tokens) -> None:
            query, key, value, decay, rate = inputs
            out = gated_delta(
                query, key, value, -torch.nn.functional.softplus(decay.float()), rate.sigmoid(), (tokens,)
            )
            out.float().sum().backward()

        figures = {f"{tokens}_s": machine.seconds(run, repeats=3), f"{tokens}_gib": machine.peak_of(run)}
        found |= machine.part(figures)
    times = [found[f"{tokens}_s"] for tokens in (most // 2, most)]
    longer = times[1] / times[0]
    expect(machine.small or longer < _LONGER, f"twice the tokens take {longer:.1f} times as long")
    return found


@check(fast=True, limit_s=120)
def gated_delta_kernels(machine: Machine) -> Figures:
    """flash-linear-attention's kernel (`model.gated_delta: fla`) against mrl's own, over packs of one, of four and of
    uneven sequences, which begin anywhere in a pack: differences of values and gradients over their norm, and seconds
    and GiB of each. On the CPU, which has no such kernel, mrl's own of one sequence after another takes its place.
    """
    from mrl.rank.gated_delta import gated_delta, gated_delta_of_fla

    if machine.device == "npu":
        raise Skip("flash-linear-attention's kernels are for CUDA")
    if not machine.small and find_spec("fla") is None:
        raise Skip("no flash-linear-attention: pip install fla-core==0.6.0")
    name, other = ("alone", _one_by_one) if machine.small else ("fla", gated_delta_of_fla)
    tokens = machine.size(16384, 512, "tokens")
    quarter = tokens // 4
    packs = {
        "one": (tokens,), "four": (quarter,) * 4,
        "uneven": (quarter + 37, 5, 2 * quarter - 101, tokens - 3 * quarter + 59),
    }  # fmt: skip
    found: Figures = {"fla": "needs CUDA"} if machine.small else {}
    for pack, lengths in packs.items():
        given = _Given(machine, lengths)
        ways = {"own": gated_delta, name: other}
        results = {way: given.run(rule) for way, rule in ways.items()}
        apart = _apart(results[name], results["own"])
        figures = {f"{pack}_{part}": error for part, error in apart.items()}
        for way, rule in ways.items():
            figures |= {
                f"{pack}_{way}_s": machine.seconds(lambda rule=rule, given=given: given.run(rule), repeats=3),
                f"{pack}_{way}_gib": machine.peak_of(lambda rule=rule, given=given: given.run(rule)),
            }
        found |= machine.part(figures)
        for part, error in apart.items():
            bound = _EXACT if machine.small else _OF_SUMS if part in ("decay", "rate") else _APART
            expect(
                error < bound,
                f"{name}, pack of {pack}: {part} is off by {error:.2g} of the norm: leave model.gated_delta at torch",
            )
    return found


class _Given:
    """Inputs of the rule as a layer has them, and a gradient of its output."""

    names = ("query", "key", "value", "decay", "rate")

    def __init__(self, machine: Machine, lengths: tuple[int, ...]):
        import torch

        heads, dim = machine.size(32, 2, "heads"), machine.size(128, 16, "dim")
        noise = torch.Generator(machine.torch_device).manual_seed(0)

        def random(*shape: int) -> Any:
            return torch.randn(shape, generator=noise, device=machine.torch_device)

        self.lengths, tokens = lengths, sum(lengths)
        wide = [random(tokens, heads, dim).to(machine.dtype) for _ in range(3)]
        # of heads that forget within a few tokens up to some that keep a thousand, so that states pass between chunks
        kept = torch.logspace(0, -3, heads, device=machine.torch_device)
        decay = -torch.nn.functional.softplus(random(tokens, heads)) * kept
        self.inputs = (*wide, decay, random(tokens, heads).sigmoid().to(machine.dtype))
        self.out = random(tokens, heads, dim).to(machine.dtype)

    def run(self, rule: Callable[..., Any]) -> dict[str, Any]:
        """Values, and the gradient of each input."""
        leaves = [x.detach().requires_grad_() for x in self.inputs]
        out = rule(*leaves, self.lengths)
        out.backward(self.out)
        return {"values": out.detach()} | {name: x.grad for name, x in zip(self.names, leaves, strict=True)}


def _one_by_one(*given: Any) -> Any:
    import torch

    from mrl.rank.gated_delta import gated_delta

    *inputs, lengths = given
    parts = zip(*(x.split(lengths) for x in inputs), lengths, strict=True)
    return torch.cat([gated_delta(*own, (length,)) for *own, length in parts])


def _apart(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    return {
        name: ((found[name].float() - exact.float()).norm() / exact.float().norm()).item()
        for name, exact in expected.items()
    }
