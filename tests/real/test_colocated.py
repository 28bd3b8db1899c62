"""Runs whose actor and engines take turns on the same devices: the bits of runs with devices for each,
and what each holds meanwhile.
"""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from deadlines import RUN_S
from first_answers import at_first_answers
from world import FOUR_GRPO_STEPS, RECIPE, ROOT, make_world, metrics, overrides

from mrl.cluster.calls import gather
from mrl.config.load import load_config
from mrl.config.schema_actor import SWITCHES
from mrl.driver.assemble import Run, open_run
from mrl.driver.loop import train, train_step, validation_metrics
from mrl.driver.preflight import RunInputs
from mrl.driver.reporting import memory_metrics
from mrl.driver.step_batch import StepBatch
from mrl.errors import Interrupted
from mrl.plan.memory_phases import ACTOR, phase_bytes
from mrl.tools.compare_runs import checkpoint_difference, metrics_difference
from mrl.units import GIB

pytestmark = [pytest.mark.real]

PRESETS = ROOT / "parallel_configs" / "tiny-moe"
STEPS = 5
OFFLOADED = {"actor__param_offload": True, "actor__grad_offload": True, "actor__optimizer_offload": True}
SETTINGS = OFFLOADED | {
    "trainer__total_training_steps": STEPS, "trainer__save_freq": 1, "trainer__test_freq": STEPS,
    "actor__ppo_mini_batch_size": 4,
    "trainer__max_actor_ckpt_to_keep": 2,
}  # fmt: skip
# TP2 and EP2 of two ranks; an engine of TP2
SMALL = {"rollout__tensor_model_parallel_size": 2}
# TP2, PP2 and EP2 of four ranks; two engines of TP2
WIDE = SMALL | {
    "actor__layout__world_size": 4, "actor__layout__pipeline_model_parallel_size": 2, "rollout__num_engines": 2,
    "cluster__cpus_per_actor": 0.25, "cluster__cpus_per_engine": 0.5,
}  # fmt: skip

SLOW = {"reshard__path": "slow"}
REFERENCE = {"algorithm__use_kl_loss": True, "algorithm__kl_loss_coef": 0.1, "ref__param_offload": True}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def separate(world, tmp_path_factory) -> Path:
    """The directory of a run with devices for each."""
    return trained(
        "cpu.yaml", world, tmp_path_factory.mktemp("separate") / "run", **SETTINGS, **SMALL, cluster__n_gpus_per_node=4
    )


def trained(preset: str, world: Path, run_dir: Path, *more: str, **values) -> Path:
    """The directory of a run through the command line that had to end well."""
    command = ["mrl", "train", str(PRESETS / preset), "--run-dir", str(run_dir), *overrides(world, **values), *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return run_dir


def assert_same_run(separate: Path, colocated: Path, step: int) -> None:
    """Metrics, but for clocks, ways of weights and hand-overs, and every bit of the last checkpoint."""
    assert metrics_difference(*(without_ways(metrics(folder)) for folder in (separate, colocated))) is None
    assert checkpoint_difference(*(folder / "checkpoints" / f"step-{step}" for folder in (separate, colocated))) is None


def without_ways(rows: list[dict]) -> list[dict]:
    """Weights take other ways to an engine on the same devices: fewer bytes over links.

    That they arrived is compared elsewhere.
    """
    return [{name: value for name, value in row.items() if not name.startswith("reshard/")} for row in rows]


class Ledgers:
    """What every process holds on its device, taken while the others work."""

    def __init__(self, run: Run):
        self._actor, self._engines = run.actor, run.responder.engines
        self._run = run
        self.engines_awake: list[int] = []
        self.engines_asleep: list[int] = []
        self.ranks_training: list[int] = []
        self.ranks_resting: list[int] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Ranks while engines generate, engines before and after the ranks' update."""
        update = StepBatch.update

        def look():
            self.ranks_resting += self._live(self._actor)
            self.engines_awake += self._live(self._engines)

        def update_watched(step, watch):
            self.engines_asleep += self._live(self._engines)
            self.ranks_training += self._live(self._actor)
            answer = update(step, watch)
            self.engines_asleep += self._live(self._engines)
            return answer

        with pytest.MonkeyPatch.context() as patch, at_first_answers(self._run, look):
            patch.setattr(StepBatch, "update", update_watched)
            yield

    def _live(self, group) -> list[int]:
        answers = gather(group.refs("memory"), 60.0, "ledgers").values()
        return [
            memory.live_bytes for answer in answers for memory in (answer if isinstance(answer, list) else [answer])
        ]


def test_turns_on_the_same_devices_change_no_bit_and_who_rests_holds_next_to_nothing(four_grpo_steps, tmp_path):
    world, separate = four_grpo_steps
    settings = FOUR_GRPO_STEPS | {"cluster__n_gpus_per_node": 2}
    with open_run(colocated(world, tmp_path / "colocated", RECIPE, **settings), resume=False) as run:
        ledgers = Ledgers(run)
        with ledgers.watching():
            train(run)
        places = [tuple(place) for name in ("actor", "engines") for place in devices_of(run, name)]
    assert_same_run(separate, tmp_path / "colocated", FOUR_GRPO_STEPS["trainer__total_training_steps"])
    assert len(places) == 4 and len(set(places)) == 2, "two ranks and two workers on two devices"
    assert max(ledgers.engines_asleep) < 0.05 * min(ledgers.engines_awake)
    rows = metrics(tmp_path / "colocated")[1:]
    moved = sum(rows[-1][f"offload/{kind}_bytes"] for kind in SWITCHES)
    # from the second step on there are moments; arenas of the sync stay, which are as large as this model
    assert min(ledgers.ranks_training[2:]) - max(ledgers.ranks_resting) > 0.95 * moved
    for row in rows:
        assert all(
            row[f"switch/{name}_s"] > 0 for name in ("sleep", "gate", "onload", "offload", "wake_weights", "wake_kv")
        )
        assert row["reshard/bytes_local"] > 0
    assert not any(name.startswith("switch/") for row in metrics(separate) for name in row)


def colocated(world: Path, run_dir: Path, recipe: str | None = None, **values) -> RunInputs:
    """The configuration of the same run on half the devices."""
    settings = [text for text in overrides(world, **values) if text != "--set"]
    settings.append(f"trainer.run_dir={run_dir}")
    return RunInputs.of(load_config(PRESETS / "cpu-colocated.yaml", recipe, settings))


@pytest.mark.long
def test_a_shortage_ends_the_step_with_the_holder_named_and_the_run_goes_on_where_there_is_room(
    world, separate, tmp_path
):
    """The plan of the second step's update asks for an optimizer that no device has room for."""
    with open_run(colocated(world, tmp_path / "run", **SETTINGS, **SMALL), resume=False) as run:
        run.placement.begin(0)
        run.record.write(0, validation_metrics(run) | memory_metrics(run.hosts))
        run.generation.begin()
        train_step(run)
        gate = run.placement._gate
        gate._plan["memory"]["phases"]["train"]["terms"]["optimizer"] = 100 * GIB
        planned = phase_bytes(gate._plan, "train").holders[ACTOR] / GIB
        with pytest.raises(Interrupted) as refused:
            train_step(run)
        text = r"no room for phase train: device 0 of node 0: (\S+) GiB of the actor are still .*?rank 0 (\S+) GiB"
        to_come, held = map(float, re.match(text, str(refused.value)).groups())
        assert 0 < held < 1 and to_come + held == pytest.approx(planned, abs=0.011)  # two roundings to 0.01
    run_dir = trained("cpu-colocated.yaml", world, tmp_path / "run", "--resume", **SETTINGS, **SMALL)
    assert_same_run(separate, run_dir, STEPS)


@pytest.mark.long
@pytest.mark.parametrize(
    "more", [WIDE, SMALL | SLOW | REFERENCE], ids=["TP2 PP2 EP2, two engines of TP2", "slow path, reference model"]
)
def test_other_layouts_and_paths_change_no_bit_either(world, tmp_path, more):
    devices = {"cpu.yaml": 2, "cpu-colocated.yaml": 1}
    ranks = more.get("actor__layout__world_size", 2)
    runs = [
        trained(preset, world, tmp_path / preset, **SETTINGS, **more, cluster__n_gpus_per_node=ranks * times)
        for preset, times in devices.items()
    ]
    assert_same_run(*runs, STEPS)


def devices_of(run: Run, group: str) -> list:
    refs = (run.actor if group == "actor" else run.responder.engines).refs("devices")
    return [place for answer in ray.get(list(refs.values())) for place in answer]
