"""An update that lacks a tensor, or brings one that the model does not have, is refused by name."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mrl.engine.receive import ReloadLedger, SlowPath

# one fused parameter in the engine, three tensors of the checkpoint
EXPECTED = {"q_proj.weight": [8, 4], "k_proj.weight": [2, 4], "v_proj.weight": [2, 4]}


def ledger(arrived: dict[str, tuple[int, ...]], written: set[str] = frozenset({"qkv_proj.weight"})) -> ReloadLedger:
    made = ReloadLedger({"qkv_proj.weight"}, EXPECTED)
    for name, shape in arrived.items():
        made.receive(name, shape)
    made.add(written)
    return made


def all_but(name: str) -> dict[str, tuple[int, ...]]:
    return {n: tuple(shape) for n, shape in EXPECTED.items() if n != name}


def test_a_whole_update_passes():
    ledger(all_but("")).check_complete()


def test_one_tensor_of_a_fused_parameter_is_missed():
    with pytest.raises(RuntimeError, match=r'lacks 1: \["k_proj.weight"\]$'):
        ledger(all_but("k_proj.weight")).check_complete()


def test_a_tensor_that_the_model_does_not_have_is_named():
    with pytest.raises(RuntimeError, match=r'the model does not: 1: \["o_proj.weight"\]'):
        ledger(all_but("") | {"o_proj.weight": (4, 4)}).check_complete()


def test_another_shape_is_named_with_both():
    with pytest.raises(RuntimeError, match=r"k_proj.weight \[4, 2\], not \[2, 4\]"):
        ledger(all_but("k_proj.weight") | {"k_proj.weight": (4, 2)}).check_complete()


def test_what_the_loader_passed_over_is_named():
    with pytest.raises(RuntimeError, match=r'unwritten in the engine 1: \["qkv_proj.weight"\]'):
        ledger(all_but(""), written=set()).check_complete()


def test_every_fault_is_told_at_once():
    with pytest.raises(RuntimeError) as caught:
        ledger(all_but("k_proj.weight") | {"o_proj.weight": (4, 4)}, written=set()).check_complete()
    assert all(name in str(caught.value) for name in ("k_proj", "o_proj", "qkv_proj"))


def test_a_tensor_that_comes_twice_is_refused():
    with pytest.raises(RuntimeError, match=r"q_proj.weight twice"):
        ledger(all_but("")).receive("q_proj.weight", (8, 4))


def test_copies_that_an_engine_makes_itself_are_not_waited_for():
    """Latent attention makes two from kv_b_proj when a reload ends, and no loader writes them."""
    model = nn.Module()
    model.attention = nn.Module()
    for leaf in ("weight", "W_UV"):
        model.attention.register_parameter(leaf, nn.Parameter(torch.zeros(1)))
    adapter = SimpleNamespace(
        is_derived=lambda leaf: leaf == "W_UV", enter=lambda model: None, abandon=lambda model: None
    )
    path = SlowPath(model, None, adapter, {})
    path.start()
    path._ledger.add({"attention.weight"})
    path._ledger.check_complete()
    path.start()
    with pytest.raises(RuntimeError, match=r'unwritten in the engine 1: \["attention\.weight"\]'):
        path._ledger.check_complete()
