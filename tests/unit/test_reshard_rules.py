"""What the configuration says of the weight sync is checked before a run."""

from pathlib import Path

import pytest
from test_config_rules import TINY_MODEL

from mrl.config.load import load_config
from mrl.config.rules import notes, violations

TINY = Path(__file__).parents[2] / "parallel_configs" / "tiny-moe" / "cpu.yaml"


def resolved(*overrides: str):
    return load_config(TINY, None, overrides)


def test_a_transport_of_one_host_is_refused_on_two():
    (found,) = [
        v for v in violations(resolved("reshard.transport=shm", "cluster.nnodes=2"), TINY_MODEL) if "reshard" in v.field
    ]
    assert (found.field, found.allowed) == ("reshard.transport", ("auto", "p2p", "ipc"))


@pytest.mark.parametrize("kind", ["auto", "p2p", "ipc"])
def test_other_transports_reach_every_host(kind):
    assert not [
        v
        for v in violations(resolved(f"reshard.transport={kind}", "cluster.nnodes=2"), TINY_MODEL)
        if "reshard" in v.field
    ]


def test_device_ipc_without_such_a_device_is_said():
    assert [n for n in notes(resolved("reshard.transport=ipc"), TINY_MODEL) if "go through shared memory" in n]
    assert not [n for n in notes(resolved("reshard.transport=shm"), TINY_MODEL) if "reshard" in n]
