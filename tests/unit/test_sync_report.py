"""What the two sides of a sync report is compared: parameters by digests, bytes by counts."""

from types import SimpleNamespace

import pytest
import torch

from mrl.model.boxes import Box
from mrl.reshard.execute import source_view
from mrl.reshard.messages import Copy
from mrl.reshard.sync_report import MODULUS, SyncTotals, disagreements

SETUP = SimpleNamespace(engine_of=lambda worker: worker // 2)


def report_of(worker: int, received: dict[str, int], held: dict[str, int] | None) -> dict:
    return {"worker": worker, "received": received, "held": held}


@pytest.mark.parametrize(
    ("received", "held", "where"),
    [
        ({"a": 5, "b": 7}, {"a": 5, "b": 7}, None),
        ({"a": 5, "b": 7}, None, None),
        ({"a": 5}, {"a": 5}, "on the way"),  # b was sent and never arrived
        ({"a": 5, "b": 8}, {"a": 5, "b": 8}, "on the way"),
        ({"a": 5, "b": 7}, {"a": 5, "b": 8}, "in the engine"),
        ({"a": 5, "b": 7}, {"a": 5}, "in the engine"),
    ],
)
def test_a_parameter_that_differs_or_is_missing_is_named_with_its_senders(received, held, where):
    """Two ranks send parts of b, whose digests add up."""
    sends = [
        {"rank": 0, "digests": {3: {"a": 5, "b": MODULUS - 1}}},
        {"rank": 4, "digests": {3: {"b": 8}}},
    ]
    found = disagreements(SETUP, sends, [report_of(3, received, held)])
    expected = [] if where is None else [f"engine 1 worker 3: b differs {where}, sent by ranks 0, 4"]
    assert [str(each) for each in found] == expected


def test_what_a_device_has_already_is_not_required_of_the_wire():
    receives = [
        {"bytes_moved": 60, "bytes_local": 40, "bytes_remote": 10, "staging_bytes": 7},
        {"bytes_moved": 90, "bytes_local": 10, "bytes_remote": 0, "staging_bytes": 9},
    ]
    totals = SyncTotals.of(150, receives, weight_bytes=200, staging_bytes=8)
    assert totals == SyncTotals(bytes_required=150, bytes_moved=150, bytes_local=50, bytes_remote=10, staging_bytes=9)
    with pytest.raises(RuntimeError, match="ranks sent 151 bytes, engines received 150"):
        SyncTotals.of(151, receives, weight_bytes=200, staging_bytes=8)


def test_a_shard_that_does_not_hold_what_is_asked_is_sent_by_nobody():
    asked = Box(((2, 6), (0, 3)))
    copy = Copy("hf", asked, "linear.weight", 0, asked, "engine.weight", asked, (0, 1))
    assert source_view(torch.arange(18.0).reshape(6, 3), copy).tolist() == [
        [6, 7, 8],
        [9, 10, 11],
        [12, 13, 14],
        [15, 16, 17],
    ]
    with pytest.raises(RuntimeError, match=r"linear.weight is \(5, 3\): it does not hold"):
        source_view(torch.zeros(5, 3), copy)
