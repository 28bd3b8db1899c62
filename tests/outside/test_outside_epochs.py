"""Epochs over a step's samples divide its rows as verl's iterator does."""

import numpy as np
from golden import golden

from mrl.config.schema import ActorConfig
from mrl.config.schema_algorithm import KlControlConfig
from mrl.rank.cut import mini_batch_rows

ORDERS = [case for case in golden("epochs") if case["what"] == "order"]


def ours(case: dict) -> list[list[int]]:
    actor = {"layout": {"world_size": 1}, "ppo_mini_batch_size": case["mini"], "ppo_epochs": case["epochs"]}
    parts = mini_batch_rows(ActorConfig(**actor, shuffle=case["shuffle"]), 1, case["rows"], (0, 1))
    return [rows.tolist() for rows in parts]


def test_epochs_in_order_are_verls():
    found = [case for case in ORDERS if not case["shuffle"]]
    assert len(found) == 40
    for case in found:
        assert ours(case) == case["gave"]


def test_drawn_epochs_have_verls_mini_batches_but_for_the_draw():
    """As many of the same sizes, and every row once in each epoch."""
    found = [case for case in ORDERS if case["shuffle"]]
    assert len(found) == 40
    for case in found:
        per_epoch = case["rows"] // case["mini"]
        for parts in (ours(case), case["gave"]):
            assert [len(part) for part in parts] == [case["mini"]] * per_epoch * case["epochs"]
            for epoch in range(case["epochs"]):
                rows = np.concatenate(parts[epoch * per_epoch : (epoch + 1) * per_epoch])
                assert sorted(rows.tolist()) == list(range(case["rows"]))
        if len(case["gave"]) > per_epoch > 1 and case["rows"] > 6:
            assert ours(case)[:per_epoch] != ours(case)[per_epoch : 2 * per_epoch]
            assert case["gave"][:per_epoch] != case["gave"][per_epoch : 2 * per_epoch]


def test_the_weight_of_the_kl_follows_verls_controller_bit_by_bit():
    cases = [case for case in golden("epochs") if case["what"] == "control"]
    assert {case["settings"]["type"] for case in cases} == {"fixed", "adaptive"} and len(cases) == 120
    for case in cases:
        control = KlControlConfig(**case["settings"])
        ours = [control.kl_coef]
        for kl in case["kls"]:
            ours.append(control.next_coef(ours[-1], kl, case["samples"]))
        assert ours == case["gave"]
