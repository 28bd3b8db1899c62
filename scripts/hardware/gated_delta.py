"""The gated delta rule at the width of Qwen3-Next: time and memory by the length of a pack."""

from checks import Figures, Machine, check, expect

_LONGER = 2.5  # times as long for twice the tokens; what grows as the square of the tokens takes four times


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
