"""flash-linear-attention's gated delta rule over packs of sequences: its chunked Triton kernel, forward and backward,
in Triton's interpreter on the CPU, and its two references in torch.
"""

import builtins
import inspect
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined

import numpy as np
import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule, naive_recurrent_gated_delta_rule
from triton.runtime.autotuner import Autotuner

PEERS = ("fla-core", "triton", "torch")
_PACKS = ((30, 40), (64,), (5, 1, 70), (130,))
_DIM = 16  # of keys and values: the least that Triton multiplies
_NAMES = ("query", "key", "value", "decay", "rate")


class _Int(int):
    """A loop's counter, which a kernel converts as if it were a tensor."""

    def to(self, *_):
        return self


def _interpretable() -> None:
    """Lets the interpreter run the kernels: no variant is timed, and counters of loops can be converted."""
    Autotuner._bench = lambda self, *_, config, **__: [0.0, 0.0, 0.0]
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops"):
            module.range = lambda *ends: (_Int(i) for i in builtins.range(*map(_whole, ends)))


def _whole(end) -> int:
    return int(end.handle.data.item() if hasattr(end, "handle") else end)


def cases() -> list[dict]:
    _interpretable()
    names = list(inspect.signature(chunk_gated_delta_rule).parameters)
    return [{"parameters": names}, *(_case(seed, lengths) for seed, lengths in enumerate(_PACKS))]


def _case(seed: int, lengths: tuple[int, ...]) -> dict:
    draw = np.random.default_rng(seed)
    tokens = sum(lengths)
    shapes = [(tokens, 1, _DIM)] * 3 + [(tokens, 1)] * 2
    given = [torch.from_numpy(draw.standard_normal(shape, np.float32)) for shape in shapes]
    given[3] = -0.3 * given[3].abs()
    given[4] = given[4].sigmoid()
    weights = torch.from_numpy(draw.standard_normal((tokens, 1, _DIM), np.float32))
    leaves = [x.clone().requires_grad_() for x in given]
    bounds = torch.tensor([0, *np.cumsum(lengths)])
    out, _ = chunk_gated_delta_rule(
        *(x[None] for x in leaves), use_qk_l2norm_in_kernel=True, cu_seqlens=bounds, cu_seqlens_cpu=bounds
    )
    (out[0] * weights).sum().backward()
    return {
        "lengths": list(lengths),
        "given": dict(zip(_NAMES, map(_plain, given), strict=True)),
        "weights": _plain(weights),
        "kernel": _plain(out[0]),
        "gradients": {name: _plain(leaf.grad) for name, leaf in zip(_NAMES, leaves, strict=True)},
        "chunked": _plain(_by_sequence(naive_chunk_gated_delta_rule, given, lengths)),
        "recurrent": _plain(_by_sequence(naive_recurrent_gated_delta_rule, given, lengths)),
    }


def _by_sequence(reference, given: list[torch.Tensor], lengths: tuple[int, ...]) -> torch.Tensor:
    """What a reference gives, which takes one sequence and normalised queries and keys."""
    query, key, value, decay, rate = given
    query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    parts = zip(*(x.split(list(lengths)) for x in (query, key, value, decay, rate)), strict=True)
    outs = [reference(q[None], k[None], v[None], g=g[None], beta=b[None])[0][0] for q, k, v, g, b in parts]
    return torch.cat(outs)


def _plain(x: torch.Tensor) -> list:
    """Shortest decimals that are the same float32."""
    return [float(str(number)) for number in x.detach().flatten().numpy()]
