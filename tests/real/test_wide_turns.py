"""Ranks and engines that take turns on the same devices, with models that can be told from a process's noise: what
every process holds in each phase of a run, in two figures.

The ledger of live device storages says what was given away. The resident set above that after the imports is held
against what the plan gives the process, on the device and on the host: on a CPU that is the same memory.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from first_answers import at_first_answers
from transformers import AutoConfig, AutoModelForCausalLM
from world import ROOT, make_world, overrides

from mrl.cluster.calls import gather
from mrl.config.load import load_config
from mrl.driver.assemble import Run, open_run
from mrl.driver.loop import train
from mrl.driver.preflight import RunInputs
from mrl.driver.step_batch import StepBatch
from mrl.plan.memory_phases import ACTOR, ENGINE, phase_bytes

pytestmark = [pytest.mark.real, pytest.mark.long]

COLOCATED = ROOT / "parallel_configs" / "tiny-moe" / "cpu-colocated.yaml"
# layers of about 50 MB in float32, nearly all of it experts; ranks, which are as many as workers, and degrees
CASES = {
    "0.4 GB, one rank": (8, 1, {}),
    "0.8 GB, TP2 EP2": (16, 2, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}),
}
STEPS = 3
ONE_RANK = {f"actor__layout__{kind}_model_parallel_size": 1 for kind in ("tensor", "expert")}
SETTINGS = {
    "actor__param_offload": True, "actor__grad_offload": True, "actor__optimizer_offload": True,
    # rounds in proportion to the models: 16 MiB are staged, between steps too
    "reshard__budget_mb": 8,
    "rollout__n": 4, "rollout__max_num_seqs": 16, "rollout__max_num_batched_tokens": 256,
    # the plan counts the copy of a checkpoint on the host, which is kept from the first save on
    "trainer__total_training_steps": STEPS, "trainer__save_freq": 1, "trainer__max_actor_ckpt_to_keep": 1,
    "trainer__val_before_train": False, "trainer__test_freq": -1,
}  # fmt: skip
OF_AWAKE = {ACTOR: 0.10, ENGINE: 0.05}  # of the ledger, at most, in who rests
OF_PLAN = 0.10  # of the resident set
# a gate stands where a phase has ended: the one that is over, or prepared, for ranks and for engines
AT_GATE = {
    "rollout_to_log_prob": {ACTOR: "rollout", ENGINE: "log_prob"},
    "train": {ACTOR: "log_prob", ENGINE: "log_prob"},
    "train_to_sync": {ACTOR: "train_to_sync", ENGINE: "train"},
    "sync_to_rollout": {ACTOR: "sync_to_rollout", ENGINE: "train_to_sync"},
}
AT_WORK, AT_REST = {ACTOR: "train", ENGINE: "rollout"}, {ACTOR: "rollout", ENGINE: "train"}


@dataclass(frozen=True)
class Moment:
    """What one process held in a phase."""

    kind: str  # ACTOR or ENGINE
    process: str
    phase: str
    live_bytes: int
    grown_bytes: int
    planned_bytes: int  # on the device and on the host


class Watch:
    """Asks every process what it holds in each phase, from the second step on, when a checkpoint has been saved."""

    def __init__(self, run: Run):
        self._run, self._actor, self._engines = run, run.actor, run.responder.engines
        self._plan = json.loads(run.run_dir.plan.read_text())
        self.moments: list[Moment] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Gates, the first answer of a generation, the end of an update."""
        placement, update = self._run.placement, StepBatch.update
        gate = placement._gate

        def let_in(phase: str) -> None:
            self._note(AT_GATE[phase])
            gate(phase)

        def look() -> None:
            self._note(dict.fromkeys((ACTOR, ENGINE), "rollout"))

        def update_watched(step, watch):
            answer = update(step, watch)
            self._note(dict.fromkeys((ACTOR, ENGINE), "train"))
            return answer

        placement._gate = let_in
        with pytest.MonkeyPatch.context() as patch, at_first_answers(self._run, look):
            patch.setattr(StepBatch, "update", update_watched)
            yield

    def _note(self, phases: dict[str, str]) -> None:
        """What everybody holds now; `phases`: which they are in, by kind of process."""
        if self._run.state.step < 1:
            return
        answers = gather(self._actor.refs("memory") | self._engines.refs("memory"), 60.0, "measuring memory")
        for name, answer in answers.items():
            kind = ACTOR if name.startswith("rank") else ENGINE
            planned = phase_bytes(self._plan, phases[kind])
            for number, memory in enumerate(answer if isinstance(answer, list) else [answer]):
                self.moments.append(
                    Moment(kind, f"{name} worker {number}" if kind == ENGINE else name, phases[kind],
                           memory.live_bytes, memory.resident_bytes - memory.baseline_bytes,
                           planned.holders[kind] + planned.host[kind])
                )  # fmt: skip


def of(moments: list[Moment], kind: str, phase: str) -> list[Moment]:
    """All of them."""
    return [moment for moment in moments if (moment.kind, moment.phase) == (kind, phase)]


@pytest.fixture(scope="module", params=CASES)
def moments(request, tmp_path_factory) -> list[Moment]:
    """Of a run in which each process was asked, of which nothing is kept besides: its handles must not outlive Ray."""
    layers, ranks, degrees = CASES[request.param]
    folder = tmp_path_factory.mktemp("turns")
    save_wide(make_world(folder) / "model", layers)
    with open_run(configured(folder, ranks, degrees), resume=False) as run:
        found = watched(run)
    shutil.rmtree(folder)  # checkpoints of some GB
    for moment in found:
        print(request.param, moment)
    return found


def watched(run: Run) -> list[Moment]:
    """What was seen while it trained."""
    watch = Watch(run)
    with watch.watching():
        train(run)
    return watch.moments


def configured(folder: Path, ranks: int, degrees: dict[str, int]) -> RunInputs:
    """A run on as many devices as there are ranks, with one engine over all of them."""
    degrees = degrees | {"world_size": ranks, "sequence_parallel": ranks > 1}
    layout = {f"actor__layout__{key}": value for key, value in degrees.items()}
    engine = {"rollout__tensor_model_parallel_size": ranks, "cluster__n_gpus_per_node": ranks}
    settings = [text for text in overrides(folder, **ONE_RANK | SETTINGS | layout | engine) if text != "--set"]
    return RunInputs.of(load_config(COLOCATED, overrides=[*settings, f"trainer.run_dir={folder / 'run'}"]))


def save_wide(folder: Path, layers: int) -> None:
    """In the place of the tiny model there, with its vocabulary and tokenizer."""
    config = AutoConfig.from_pretrained(folder)
    sizes = {"hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 512, "num_experts": 16,
             "num_hidden_layers": layers, "num_attention_heads": 8, "head_dim": 64}  # fmt: skip
    config.update(sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(folder)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [ACTOR, ENGINE])
def test_who_rests_has_given_its_device_memory_away(moments, kind):
    awake = min(moment.live_bytes for moment in of(moments, kind, AT_WORK[kind]))
    rests = of(moments, kind, AT_REST[kind])
    assert awake > 0.2e9 and len(rests) >= STEPS - 1
    assert max(moment.live_bytes for moment in rests) < OF_AWAKE[kind] * awake


@pytest.mark.timeout(900)
def test_what_a_process_holds_is_what_the_plan_gives_it_in_every_phase(moments):
    """A rank to a tenth of the phase's bytes, an engine, which holds next to nothing asleep, to a tenth of those that
    it is awake with.
    """
    awake = max(moment.planned_bytes for moment in of(moments, ENGINE, "rollout"))
    scale = {ACTOR: lambda moment: moment.planned_bytes, ENGINE: lambda _: awake}
    assert {moment.phase for moment in moments} >= {"rollout", "log_prob", "train", "train_to_sync"}
    wrong = [m for m in moments if abs(m.grown_bytes - m.planned_bytes) > OF_PLAN * scale[m.kind](m)]
    assert wrong == []
