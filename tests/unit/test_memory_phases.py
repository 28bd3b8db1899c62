"""What is on a device in each phase, what is named when it is too much, and the table of devices."""

import pytest

from mrl.errors import ConfigError
from mrl.plan.devices import default_device, devices, find_device
from mrl.plan.memory_phases import (
    HOLDERS,
    TERMS,
    ActorBytes,
    EngineBytes,
    Offload,
    Phase,
    actor_phases,
    colocated_phases,
    engine_phases,
    phase_bytes,
    with_optimizer_early,
)
from mrl.plan.sample_bytes import SampleBytes

GIB = 1024**3
DEVICE = find_device("h100-80g")
ACTOR = ActorBytes(parameters=10, gradients=20, optimizer=30, activations=40, temporaries=5, log_prob=7, sync_staging=3)
ENGINE = EngineBytes(weights=100, working_set=11, cache=200, sync_staging=4, asleep=2)


def totals(phases: list[Phase]) -> dict[str, int]:
    return {phase.name: phase.total for phase in phases}


def with_offload(**what) -> ActorBytes:
    return ActorBytes(**{**vars(ACTOR), "offload": Offload(**what)})


def test_separate_devices_hold_only_their_own():
    assert totals(actor_phases(ACTOR, DEVICE)) == {"train": 105, "log_prob": 67, "sync": 63}
    assert totals(engine_phases(ENGINE, DEVICE)) == {"rollout": 311, "rollout_sync": 104}


def test_a_shared_device_holds_both_at_every_hand_over():
    assert totals(colocated_phases(ACTOR, ENGINE, DEVICE)) == {
        "train": 107,
        "log_prob": 69,
        "train_to_sync": 60 + 100 + 7 + 2,
        "sync_to_rollout": 60 + 311,
        "rollout": 60 + 311,
        "rollout_to_log_prob": 60 + 2 + 7,
    }


def test_what_is_offloaded_comes_back_only_where_it_is_needed():
    phases = totals(colocated_phases(with_offload(parameters=True, gradients=True, optimizer=True), ENGINE, DEVICE))
    assert phases["rollout"] == 311
    assert phases["train_to_sync"] == 10 + 100 + 7 + 2  # parameters are read, optimizer and gradients are not
    assert phases["train"] == 107


def test_the_optimizer_comes_back_beside_log_probs_where_every_stage_has_room_for_both():
    away = with_offload(parameters=True, gradients=True, optimizer=True)
    stages = [colocated_phases(away, ENGINE, DEVICE)] * 2
    early = with_optimizer_early(stages, [away, away])
    before, after = totals(stages[0]), totals(early[1])
    assert {name: after[name] - before[name] for name in before if after[name] != before[name]} == {
        "log_prob": 30,
        "rollout_to_log_prob": 30,
    }
    large = ActorBytes(**{**vars(away), "optimizer": DEVICE.usable})
    stages = [colocated_phases(actor, ENGINE, DEVICE) for actor in (away, large)]
    assert with_optimizer_early(stages, [away, large]) == stages


def test_host_memory_holds_what_left_the_device_and_gradients_are_dropped():
    away = with_offload(parameters=True, gradients=True, optimizer=True).host
    expected = {"parameters": 10, "optimizer": 30, "reference": 0, "teacher": 0, "optimizer_host": 0, "critic": 0}
    assert away == expected
    assert ActorBytes(**{**vars(ACTOR), "optimizer_host": 16}).host["optimizer_host"] == 16
    assert not any(ACTOR.host.values())


def test_a_reference_model_stays_unless_it_is_offloaded_and_has_a_phase_of_its_own():
    kept = ActorBytes(**{**vars(ACTOR), "reference": 10})
    away = ActorBytes(**{**vars(kept), "offload": Offload(reference=True)})
    assert totals(actor_phases(kept, DEVICE)) == {"train": 115, "log_prob": 77, "sync": 73, "ref": 60 + 10 + 7}
    # in the actor's place
    assert totals(actor_phases(away, DEVICE)) == {"train": 105, "log_prob": 67, "sync": 63, "ref": 60 + 7}
    assert (kept.host["reference"], away.host["reference"]) == (0, 10)
    assert totals(colocated_phases(kept, ENGINE, DEVICE))["rollout"] == 60 + 10 + 311


@pytest.mark.parametrize("term", sorted(name for name, term in TERMS.items() if term.cure))
def test_what_does_not_fit_names_its_largest_part_and_what_to_change(term):
    phase = Phase("train", {"other": 1, term: 79 * GIB}, DEVICE.usable)
    assert (phase.fits, phase.largest, phase.cure) == (False, term, TERMS[term].cure)
    assert Phase("train", {term: 1}, DEVICE.usable).cure == ""


def test_a_phase_is_split_by_who_holds_it():
    phases = {phase.name: phase.to_json() for phase in colocated_phases(with_offload(optimizer=True), ENGINE, DEVICE)}
    host = {"bytes_of_a_rank": 30, "bytes_of_a_worker": 5}
    plan = {"memory": {"phases": phases, "host": host}, "layout": {"placement": "colocated"}}
    assert phase_bytes(plan, "train_to_sync").holders == {"actor": 10 + 20 + 3, "engine": 100 + 4 + 2}
    assert phase_bytes(plan, "train_to_sync").untracked == 2
    assert phase_bytes(plan, "rollout").holders == {"actor": 10 + 20, "engine": 311}
    assert phase_bytes(plan, "rollout").host == {"actor": 30, "engine": 5}
    assert phase_bytes(plan, "train").holders == {"actor": 105, "engine": 2}
    assert (phase_bytes(plan, "train").total, phase_bytes(plan, "train").available) == (107, DEVICE.usable)
    with pytest.raises(ConfigError, match=r"phase sync: .*colocated has train, log_prob, train_to_sync"):
        phase_bytes(plan, "sync")


def test_what_samples_take_is_there_while_they_are_computed_and_recorded_routes_stay():
    samples = SampleBytes(update=1, log_prob=2, update_routes=100, log_prob_routes=200, recorded_routes=1000)
    actor = ActorBytes(**{**vars(ACTOR), "samples": samples})
    assert totals(actor_phases(actor, DEVICE)) == {"train": 105 + 1101, "log_prob": 67 + 1202, "sync": 63 + 1000}
    phases = totals(colocated_phases(actor, ENGINE, DEVICE))
    assert phases["rollout_to_log_prob"] == phases["log_prob"] == 69 + 1202
    assert phases["train_to_sync"] == 169 + 1000 and phases["rollout"] == 371 + 1000


def test_an_engine_that_is_awake_has_context_and_communicators_outside_its_share():
    engine = EngineBytes(**{**vars(ENGINE), "outside": 5})
    phases = totals(colocated_phases(ACTOR, engine, DEVICE))
    assert (phases["rollout"], phases["sync_to_rollout"]) == (60 + 311 + 5, 60 + 311 + 5)
    assert phases["train_to_sync"] == 60 + 100 + 7 + 2  # what stays asleep includes it
    assert totals(engine_phases(engine, DEVICE)) == {"rollout": 311 + 5, "rollout_sync": 104 + 5}


def test_every_term_has_a_cure_and_a_holder():
    phases = [
        *actor_phases(ActorBytes(**{**vars(ACTOR), "reference": 1}), DEVICE),
        *engine_phases(ENGINE, DEVICE),
        *colocated_phases(ActorBytes(**{**vars(ACTOR), "samples": SampleBytes(1, 1, 1, 1, 1)}), ENGINE, DEVICE),
    ]
    assert all(TERMS[term].cure for phase in phases for term in phase.terms)
    assert all(bool(term.cure) == (term.holder in HOLDERS) for term in TERMS.values())
    assert all(term.cure or term.host_cure for term in TERMS.values())


def test_the_device_table_has_the_devices_of_the_presets_each_with_a_source():
    assert {"h100-80g", "h200-141g", "a100-80g", "ascend-910b-64g", "ascend-a3-64g", "cpu"} <= set(devices())
    for device in devices().values():
        assert device.source
        assert 0 < device.usable < device.memory
        assert device.network_rate <= device.node_rate <= device.memory_rate


def test_an_unknown_device_is_refused_with_the_list():
    with pytest.raises(ConfigError, match=r"h100-81g.*is not known.*h100-80g.*ascend-910b-64g"):
        find_device("h100-81g")


def test_without_a_name_the_smallest_memory_is_assumed():
    assert {platform: default_device(platform).name for platform in ("cuda", "npu", "cpu")} == {
        "cuda": "h100-80g",
        "npu": "ascend-a3-64g",
        "cpu": "cpu",
    }
