"""Gated delta attention is flash-linear-attention's: its chunked kernel's values and gradients over packs, and those of
its references; and what mrl hands to that kernel is what the golden values were made with.
"""

import sys
from types import ModuleType

import pytest
import torch
from golden import golden

from mrl.rank.gated_delta import _RULES, GatedDelta, gated_delta, gated_delta_of_fla, set_delta_kernel

NAMES = ("query", "key", "value", "decay", "rate")
PARAMETERS, *CASES = golden("gated_delta")
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case["lengths"])))


def of_tokens(case: dict, numbers: list[float], name: str = "value") -> torch.Tensor:
    shape = (sum(case["lengths"]), 1) if name in ("decay", "rate") else (sum(case["lengths"]), 1, -1)
    return torch.tensor(numbers).reshape(shape)


def given(case: dict) -> list[torch.Tensor]:
    return [of_tokens(case, case["given"][name], name) for name in NAMES]


@by_case
def test_values_and_gradients_are_those_of_the_kernel(case):
    leaves = [x.requires_grad_() for x in given(case)]
    out = gated_delta(*leaves, tuple(case["lengths"]))
    (out * of_tokens(case, case["weights"])).sum().backward()
    torch.testing.assert_close(out.detach(), of_tokens(case, case["kernel"]), rtol=1e-5, atol=1e-6)
    for name, leaf in zip(NAMES, leaves, strict=True):
        expected = of_tokens(case, case["gradients"][name], name)
        torch.testing.assert_close(leaf.grad, expected, rtol=1e-4, atol=1e-5, msg=name)


@by_case
@pytest.mark.parametrize("reference", ["chunked", "recurrent"])
def test_values_are_those_of_the_references(case, reference):
    out = gated_delta(*given(case), tuple(case["lengths"]))
    torch.testing.assert_close(out, of_tokens(case, case[reference]), rtol=1e-5, atol=1e-6)


@by_case
def test_the_kernel_is_called_as_it_was_for_these_values(case, monkeypatch):
    package = ModuleType("fla.ops.gated_delta_rule")

    def chunk_gated_delta_rule(*tensors, use_qk_l2norm_in_kernel, cu_seqlens, cu_seqlens_cpu):
        assert all(torch.equal(found[0], x) for found, x in zip(tensors, given(case), strict=True))
        assert use_qk_l2norm_in_kernel and torch.equal(cu_seqlens, cu_seqlens_cpu)
        assert cu_seqlens.diff().tolist() == case["lengths"] and cu_seqlens.dtype is torch.int64
        return of_tokens(case, case["kernel"])[None], None

    package.chunk_gated_delta_rule = chunk_gated_delta_rule
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.ops", ModuleType("fla.ops"))
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", package)
    out = gated_delta_of_fla(*given(case), tuple(case["lengths"]))
    torch.testing.assert_close(out, gated_delta(*given(case), tuple(case["lengths"])), rtol=1e-5, atol=1e-6)
    names = PARAMETERS["parameters"]
    assert names[:5] == ["q", "k", "v", "g", "beta"]
    assert {"use_qk_l2norm_in_kernel", "cu_seqlens", "cu_seqlens_cpu"} <= set(names)


def test_the_chosen_kernel_is_that_of_every_layer():
    layers = [GatedDelta.__new__(GatedDelta) for _ in range(2)]
    for layer in layers:
        torch.nn.Module.__init__(layer)
    set_delta_kernel([torch.nn.Sequential(torch.nn.Identity(), layer) for layer in layers], "fla")
    assert all(_RULES[layer.kernel] is gated_delta_of_fla for layer in layers)
