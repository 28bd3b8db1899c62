"""A frozen parameter keeps every bit, also where the checkpoint that a run starts from has moments of the updates
before.
"""

from types import SimpleNamespace

import pytest
import torch

from mrl.checkpoint.manifest import MASTER
from mrl.rank.adam_state import AdamState
from mrl.rank.optimizer import freeze
from mrl.rank.parameter_marks import is_frozen
from mrl.rank.rank_load import _load_optimizer_part
from mrl.rank.rank_parameters import MOMENTS, RankParameter

VALUES = {MASTER: 0.3} | dict.fromkeys(MOMENTS, 0.01)


class Stored:
    """A checkpoint that has these values in every element."""

    def fill(self, role, pieces, whole):
        whole.fill_(VALUES[role])


def resumed(frozen: bool, dtype: torch.dtype) -> tuple[torch.nn.Parameter, torch.Tensor, torch.optim.Adam]:
    """A parameter, its master weights and their Adam, after a load of step 7."""
    parameter = torch.nn.Parameter(torch.full((2, 3), 0.3, dtype=dtype))
    if frozen:
        freeze([parameter])
    main = torch.nn.Parameter(torch.zeros(6))
    adam = torch.optim.AdamW([main], lr=0.1, weight_decay=0.0)
    optimizer = SimpleNamespace(optimizer=adam, model_param_group_index_map={parameter: (0, 0)})
    trained = RankParameter(
        SimpleNamespace(local_shape=(2, 3), pieces=()), parameter, optimizer, (0, 6), AdamState(adam)
    )
    with torch.no_grad():
        _load_optimizer_part(Stored(), trained, 7.0, has_masters=True)
    return parameter, main, adam


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frozen", [True, False])
def test_only_what_is_frozen_stays_where_it_was_over_updates_after_a_resume(frozen, dtype):
    parameter, main, adam = resumed(frozen, dtype)
    before = main.detach().clone()
    for _ in range(5):
        parameter.grad = None
        (parameter.float() * 3).sum().backward()
        # of Adam without gradient: its moments alone
        main.grad = parameter.grad.float().reshape(-1) if frozen else torch.zeros(6)
        adam.step()
    assert torch.equal(main, before) == frozen == is_frozen(parameter)
    assert adam.state[main]["step"] == 12


def test_a_parameter_that_is_trained_gets_the_moments_of_the_checkpoint():
    _, main, adam = resumed(False, torch.float32)
    assert all(adam.state[main][name].eq(0.01).all() for name in MOMENTS.values())
