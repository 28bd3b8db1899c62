"""Saving beside the training: what a full disk, a death at any moment and an error in the background do,
and what they never do.
"""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from seldom import seldom
from small_model import SIZES, write_model

from mrl.checkpoint import disk_space
from mrl.checkpoint.manifest import (
    EXP_AVG,
    EXP_AVG_SQ,
    WEIGHT,
    RankFiles,
    StoredTensor,
    check_digests,
    file_facts,
    read_manifest,
)
from mrl.checkpoint.step_folders import newest_checkpoint
from mrl.config.schedule_rules import schedule_of
from mrl.config.schema import RunConfig
from mrl.data.order import DataCursor
from mrl.driver.resume import RunIdentity
from mrl.driver.saving import BackgroundWrite, SavedRun, Saver
from mrl.errors import EnvironmentFault, LostLock, NumericAbort
from mrl.generate.train_state import TrainState
from mrl.model import model_spec
from mrl.model.boxes import Box
from mrl.model.megatron_shards import Piece
from mrl.rank import rank_load, rank_save
from mrl.rank.adam_state import AdamState
from mrl.rank.rank_parameters import RankParameter
from mrl.rank.rank_save import HostCopy, file_bytes, write_tensors

FULL = Path("/dev/full")  # every write to it finds no space left
WHOLE = Box.whole((4,))


class FakeActor:
    """One rank with four weights that are all the step's number."""

    def __init__(self):
        self.weights = torch.zeros(4)
        self.disk_is_full = False
        self.may_write = Event()
        self.may_write.set()
        self.num_updates = [1]

    def take_checkpoint(self) -> int:
        self.taken = {"weight/w": self.weights.clone()}
        return file_bytes(self.taken)

    def write_checkpoint(self, work: Path) -> list[dict]:
        assert self.may_write.wait(10)
        file = work / "rank-00000.safetensors"
        if self.disk_is_full:
            file.symlink_to(FULL)
        facts = {file.name: write_tensors(file, self.taken)}
        entries = (StoredTensor(file.name, "weight/w", WEIGHT, (4,), None, (Piece("w", WHOLE, WHOLE),)),)
        return [RankFiles(entries, facts, {"num_updates": n, "step": float(n)}).to_json() for n in self.num_updates]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saving") / "model"
    write_model(folder)
    return folder


@pytest.fixture
def run(model, tmp_path):
    return made_run(model, tmp_path)


def made_run(model: Path, folder: Path, **trainer):
    config = RunConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": "float32"},
            "actor": {"layout": {"world_size": 1}, "ppo_mini_batch_size": 1},
            "data": {"train_batch_size": 1}, "trainer": trainer, "cluster": {"device": "cpu"},
        }
    )  # fmt: skip
    actor = FakeActor()
    saver = Saver(config.trainer, SavedRun(RunIdentity.of(config), config.actor.layout, "f"), folder, actor, 0)
    return SimpleNamespace(config=config, folder=folder, actor=actor, saver=saver, state=TrainState())


def trained(run) -> None:
    """One more step."""
    run.state = run.state.advanced(DataCursor(0, run.state.step + 1))
    run.actor.weights += 1


def stored(folder: Path) -> float:
    """The number that all weights of a checkpoint are, every byte of which is checked."""
    check_digests(folder, read_manifest(folder))
    (number,) = set(load_file(folder / "rank-00000.safetensors")["weight/w"].tolist())
    return number


def bytes_below(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_file_reads_back_through_safetensors_and_its_facts_are_those_of_the_disk(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "odd bytes": torch.arange(7, dtype=torch.uint8), "half": torch.randn(3, 5).bfloat16(),
        "whole": torch.randn(2, 3),
        "one": torch.tensor(2.5, dtype=torch.float64), "none": torch.zeros(0, 4), "counts": torch.arange(5),
        "flag": torch.tensor([True]),
    }  # fmt: skip
    path = tmp_path / "a.safetensors"
    copy = HostCopy()
    copy._buffers = tensors
    (told,) = copy.facts().values()  # without a file
    assert write_tensors(path, tensors) == file_facts(path) == told and path.stat().st_size == file_bytes(tensors)
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(read[name].dtype == t.dtype and torch.equal(read[name], t) for name, t in tensors.items())


def test_a_tensor_longer_than_a_piece_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("mrl.rank.rank_save._WRITE_BYTES", 5)
    tensors = {"a": torch.arange(9.0), "b": torch.arange(3, dtype=torch.uint8)}
    assert write_tensors(tmp_path / "a", tensors) == file_facts(tmp_path / "a")
    assert torch.equal(load_file(tmp_path / "a")["a"], tensors["a"])


def test_a_rank_says_which_file_the_disk_did_not_take(tmp_path):
    copy = HostCopy()
    copy._rank = 3
    (tmp_path / "rank-00003.safetensors").symlink_to(FULL)
    with pytest.raises(EnvironmentFault, match=r"rank-00003.*No space left on device"):
        copy.write(tmp_path)


def test_updates_that_were_skipped_in_a_row_are_counted_on_after_a_resume(monkeypatch):
    """Or a run of NaN that is saved and started again would never meet trainer.max_skipped_updates."""
    monkeypatch.setattr(rank_save, "distributed_optimizers", lambda actor: [])
    monkeypatch.setattr(rank_save, "current_lr", lambda optimizer: 0.5)
    scheduler = SimpleNamespace(state_dict=dict)
    saved = SimpleNamespace(num_updates=5, skipped_in_a_row=2, optimizer=None, scheduler=scheduler)
    facts = rank_save._optimizer_facts(saved)
    fresh = SimpleNamespace(num_updates=0, skipped_in_a_row=0)
    rank_load._restore_counts(fresh, facts)
    assert (fresh.num_updates, fresh.skipped_in_a_row) == (5, 2)
    rank_load._restore_counts(fresh, {"num_updates": 4})  # of converted weights
    assert (fresh.num_updates, fresh.skipped_in_a_row) == (4, 0)


def test_a_copy_that_is_being_written_is_not_overwritten(tmp_path, monkeypatch):
    copy = HostCopy()

    def takes_meanwhile(path, tensors):
        with pytest.raises(EnvironmentFault, match="still being written"):
            copy.take(None)
        return {"bytes": 0, "sha256": ""}

    monkeypatch.setattr("mrl.rank.rank_save.write_tensors", takes_meanwhile)
    assert copy.write(tmp_path).files == {"rank-00000.safetensors": {"bytes": 0, "sha256": ""}}


def test_moments_are_copied_as_they_are_and_zeros_are_made_only_where_there_are_none(monkeypatch):
    weight = torch.nn.Parameter(torch.ones(4))
    adam = torch.optim.Adam([weight])
    index = SimpleNamespace(optimizer=adam, model_param_group_index_map={weight: (0, 0)})
    parameter = RankParameter(SimpleNamespace(primary=1), weight, index, (0, 4), AdamState(adam))
    monkeypatch.setattr(rank_save, "_writes_optimizer_part", lambda actor, shard: True)

    def moments() -> list[torch.Tensor]:
        found = list(rank_save._saved_tensors(SimpleNamespace(rank=0), parameter))
        assert [(role, flat) for role, _, flat in found] == [(EXP_AVG, (0, 4)), (EXP_AVG_SQ, (0, 4))]
        return [tensor for _, tensor, _ in found]

    assert all(torch.equal(moment, torch.zeros(4)) for moment in moments())
    adam.state[weight] = {"exp_avg": torch.full((4,), 2.0), "exp_avg_sq": torch.full((4,), 3.0)}
    monkeypatch.setattr(rank_save.torch, "zeros_like", lambda tensor: pytest.fail("memory for nothing"))
    assert [moment.data_ptr() for moment in moments()] == [
        adam.state[weight][name].data_ptr() for name in ("exp_avg", "exp_avg_sq")
    ]


def test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it(run):
    trained(run)
    run.actor.may_write.clear()
    run.saver.save(run.state, {"actor/lr": 0.5})
    trained(run)
    assert run.saver.finished() == {} and run.saver.saved_step == 0
    run.actor.may_write.set()
    assert run.saver.finished(wait=True)["perf/checkpoint_write_s"] > 0
    folder = run.folder / "step-1"
    assert stored(folder) == 1.0 and run.saver.saved_step == 1
    manifest = read_manifest(folder)
    assert manifest.trainer["metrics"] == {"actor/lr": 0.5} and manifest.trainer["cursor"] == {"epoch": 0, "index": 1}
    assert (folder / "hf" / "tokenizer.json").is_file()


def test_a_save_waits_for_the_one_before(run):
    trained(run)
    run.saver.save(run.state)
    trained(run)
    run.saver.save(run.state)
    assert stored(run.folder / "step-1") == 1.0
    run.saver.save_last(run.state)
    assert stored(run.folder / "step-2") == 2.0
    with pytest.raises(RuntimeError, match="before it is known how the save of step 1 ended"):
        writing = BackgroundWrite()
        writing.begin(1, lambda: None)
        writing.begin(2, lambda: None)


def test_without_async_save_a_checkpoint_is_there_when_training_goes_on(model, tmp_path):
    run = made_run(model, tmp_path, async_save=False)
    trained(run)
    run.saver.save(run.state)
    assert stored(tmp_path / "step-1") == 1.0 and run.saver.saved_step == 1


@pytest.mark.parametrize("async_save", [True, False])
def test_a_full_disk_costs_the_checkpoint_that_did_not_fit_and_nothing_else(model, tmp_path, capsys, async_save):
    run = made_run(model, tmp_path, async_save=async_save, max_actor_ckpt_to_keep=1)
    trained(run)
    run.saver.save(run.state)
    run.saver.finished(wait=True)
    before = bytes_below(tmp_path)
    run.actor.disk_is_full = True
    trained(run)
    run.saver.save(run.state)
    run.saver.finished(wait=True)
    assert run.saver.failed_saves == 1 and run.saver.saved_step == 1
    assert bytes_below(tmp_path) == before and [p.name for p in tmp_path.iterdir()] == ["step-1"]
    said = capsys.readouterr().out
    assert "step 2 is not saved" in said and "No space left on device" in said
    run.actor.disk_is_full = False
    trained(run)
    run.saver.save_last(run.state)
    assert [p.name for p in tmp_path.iterdir()] == ["step-3"] and run.saver.failed_saves == 1


@pytest.mark.parametrize("async_save", [True, False])
def test_as_many_failed_saves_in_a_row_as_may_be_end_the_run(model, tmp_path, async_save):
    run = made_run(model, tmp_path, async_save=async_save, max_failed_saves=2)

    def save(full: bool) -> None:
        run.actor.disk_is_full = full
        trained(run)
        run.saver.save(run.state)
        run.saver.finished(wait=True)

    for full in (True, False, True):  # one that is taken ends the row
        save(full)
    with pytest.raises(EnvironmentFault, match=r"2 saves in a row failed .* of step 4: .*No space.* that of step 2"):
        save(True)


def test_where_there_is_no_room_nothing_is_begun(run, monkeypatch, capsys):
    monkeypatch.setattr(disk_space, "free_bytes", lambda folder: 1_000_000)
    trained(run)
    run.saver.save(run.state)
    assert list(run.folder.iterdir()) == [] and run.saver.failed_saves == 1
    run.saver.write(TrainState(1))  # nothing was taken
    assert run.saver.failed_saves == 1
    # 4 MiB beside the tensors, rounded up
    assert "a checkpoint needs 4.20 MB and 1.00 MB are free" in capsys.readouterr().out


def test_what_is_written_is_what_was_copied_before_the_weights_moved_on(run):
    """A copy is taken when the ranks have room for it, and written when the step's metrics are known."""
    run.actor.weights.fill_(1)
    run.saver.take(1)
    run.actor.weights.fill_(2)
    # nothing was taken of step 2
    assert run.saver.write(TrainState(2)) == {} and not run.folder.joinpath("step-2").exists()
    run.saver.write(TrainState(1), {"critic/score/mean": 0.5})
    run.saver.finished(wait=True)
    assert load_file(run.folder / "step-1" / "rank-00000.safetensors")["weight/w"].tolist() == [1.0] * 4
    assert read_manifest(run.folder / "step-1").trainer["metrics"] == {"critic/score/mean": 0.5}


def test_the_last_step_unsaved_ends_the_run_with_an_error_that_says_what_is_left(run):
    trained(run)
    run.saver.save_last(run.state)
    run.actor.disk_is_full = True
    trained(run)
    with pytest.raises(
        EnvironmentFault, match=r"step 2 is not saved \(.*No space.*the newest checkpoint is that of step 1.*--resume"
    ):
        run.saver.save_last(run.state)
    run.actor.disk_is_full = False
    run.saver.save_last(run.state)
    assert stored(run.folder / "step-2") == 2.0


def test_a_saver_that_counts_on_knows_how_long_a_save_takes(run, model, tmp_path):
    """So that a signal begins none that does not fit its grace, also before the first save of restarted ranks."""
    trained(run)
    run.saver.save(run.state)
    run.saver.finished(wait=True)
    other = made_run(model, tmp_path / "other").saver
    assert other.last_s == 0.0 < run.saver.last_s
    other.count_on(run.saver)
    assert other.last_s == run.saver.last_s


def test_what_is_no_fault_of_the_disk_is_raised_when_it_is_heard_of(run):
    run.actor.num_updates = [1, 2]
    trained(run)
    run.saver.save(run.state)
    with pytest.raises(NumericAbort, match="rank 1 has optimizer num_updates 2"):
        run.saver.finished(wait=True)
    assert list(run.folder.iterdir()) == []


def test_a_run_that_ends_early_waits_for_what_it_began(run, capsys):
    trained(run)
    run.saver.save(run.state)
    run.saver.close()
    assert stored(run.folder / "step-1") == 1.0
    other = BackgroundWrite()
    other.begin(7, lambda: 1 / 0)
    other.close()
    assert "not saved: division by zero" in capsys.readouterr().out


def dies_at(event: int, model: Path, folder: Path) -> bool:
    """Saves a second step in a process that is gone at its `event`-th touch of the disk; whether it came so far."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    run = made_run(model, folder, async_save=False, max_actor_ckpt_to_keep=1)
    run.saver.saved_step = 1
    for _ in range(2):
        trained(run)
    left = [event]

    def watch(name: str, arguments: tuple) -> None:
        if name in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") or name.startswith("shutil."):
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)

    sys.addaudithook(watch)
    run.saver.save(run.state)
    os._exit(0)


@pytest.mark.parametrize("every", seldom([4, 1], 4))
def test_a_death_at_any_touch_of_the_disk_leaves_a_whole_checkpoint(model, tmp_path, every):
    """Retention keeps one, so the first is removed within the same save.

    Every call that changes the disk is a place to die.
    """
    (tmp_path / "begun").mkdir()
    begun = made_run(model, tmp_path / "begun")
    trained(begun)
    begun.saver.save_last(begun.state)
    event, ended = 1 - every, False
    while not ended:
        event += every
        folder = tmp_path / str(event)
        shutil.copytree(begun.folder, folder)
        ended = not dies_at(event, model, folder)
        found = newest_checkpoint(folder)
        assert found.path is not None and found.damaged == {}, f"event {event}: {found}"
        check_digests(found.path, found.manifest)
        assert stored(found.path) == found.manifest.step
    assert found.manifest.step == 2 and [p.name for p in folder.iterdir()] == ["step-2"]
    assert event > 30, "a save touches the disk more often than that"


def test_the_arithmetic_of_room_counts_every_parameter_once():
    """float32: the weight and two moments, 12 bytes. bfloat16: 2 for the weight, 4 for its master,
    8 for the moments.
    """
    h, heads, kv, d, vocab, experts, wide = 64, 4, 2, 16, 128, 4, 64
    layer = 2 * h + h * heads * d * 2 + h * kv * d * 2 + 2 * d + experts * h + experts * 3 * h * wide
    parameters = 2 * vocab * h + 2 * layer + h
    assert disk_space.checkpoint_bytes(model_spec(SIZES), "float32") - disk_space.BESIDE_TENSORS == 12 * parameters
    assert disk_space.checkpoint_bytes(model_spec(SIZES), "bfloat16") - disk_space.BESIDE_TENSORS == 14 * parameters


def test_a_run_whose_checkpoint_does_not_fit_is_refused_before_anything_is_written(model, tmp_path, monkeypatch):
    assert disk_space.free_bytes(tmp_path / "not" / "there" / "yet") > 0
    monkeypatch.setattr(disk_space, "free_bytes", lambda folder: 5_000_000)
    with pytest.raises(EnvironmentFault, match=r"a checkpoint needs 5\.01 GB and 5\.00 MB are free; make room"):
        disk_space.check_disk_space(tmp_path, 5_000_000_001)
    disk_space.check_disk_space(tmp_path, 5_000_000)
    size = disk_space.checkpoint_bytes(model_spec(SIZES), "float32")
    (note,) = disk_space.disk_space_note(tmp_path, size, kept=2)
    assert "trainer.max_actor_ckpt_to_keep is 2, and one more" in note and "room for 0 more" in note
    monkeypatch.setattr(disk_space, "free_bytes", lambda folder: 10**9)
    assert disk_space.disk_space_note(tmp_path, size, kept=2) == []
    (note,) = disk_space.disk_space_note(tmp_path, size, kept=2, replays=10**9)
    assert "room for 0 more" in note and "beside up to 1.00 GB of responses that a restart would use" in note


def test_groups_that_generation_is_ahead_with_need_room_too(model, tmp_path, monkeypatch):
    """One step off: two steps of one group of two responses, of 3 and 5 tokens at most; 4 bytes an id, 4 a log-prob."""
    ahead = {"data": {"train_batch_size": 1, "max_prompt_length": 3, "max_response_length": 5}, "rollout": {"n": 2}}
    config = made_run(model, tmp_path, schedule="one_step_off").config
    config = RunConfig.model_validate(config.model_dump() | ahead)
    assert disk_space.groups_ahead_bytes(schedule_of(config), config.data, 0) == 2 * 2 * (8 * 4 + 5 * 4)
    synchronous = replace(schedule_of(config), max_staleness=0)
    assert disk_space.groups_ahead_bytes(synchronous, config.data, 0) == 0
    for beside in (False, True):
        kept = disk_space.replay_bytes(synchronous, config.data, 0, beside)
        assert kept == (1 + beside) * 2 * (8 * 4 + 5 * 4), "a step's, and one's more while a checkpoint is written"


def test_who_keeps_things_of_a_checkpoint_is_told_of_each_newer_one_that_is_whole(run):
    told = []
    run.saver.tell_saved = told.append
    for is_full in (False, True, False):
        trained(run)
        run.actor.disk_is_full = is_full
        run.saver.save(run.state)
        assert run.state.step not in told, "it is being written"
        run.saver.finished(wait=True)
    assert told == [1, 3]
    assert read_manifest(run.folder / "step-3").trainer["weights"] == run.state.weights != ""


def test_a_save_that_has_no_room_for_kept_groups_is_counted_and_leaves_nothing(run, monkeypatch):
    trained(run)
    free = disk_space.BESIDE_TENSORS + 10**6
    monkeypatch.setattr(disk_space, "free_bytes", lambda folder: free)
    held = []
    kept = SimpleNamespace(
        bytes_to_write=lambda route_bytes: 10**6, write=lambda work: {}, hold=lambda: held.append(1), release=held.pop
    )
    run.saver.save(replace(run.state, ahead=kept))
    run.saver.finished(wait=True)
    assert run.saver.failed_saves == 1 and list(run.folder.glob("step-*")) == []
    kept.bytes_to_write = lambda route_bytes: 10**5
    kept.write = lambda work: {"held": len(held)}
    run.saver.save(replace(run.state, ahead=kept))
    run.saver.finished(wait=True)
    assert held == [], "a write that is over or given up holds nothing"
    written = json.loads((run.folder / f"step-{run.state.step}" / "manifest.json").read_text())
    assert written["trainer"]["ahead"] == {"held": 1}
    assert run.saver.saved_step == run.state.step


def test_the_manifest_of_a_save_is_json_of_plain_numbers(run):
    trained(run)
    run.saver.save_last(run.state)
    written = json.loads((run.folder / "step-1" / "manifest.json").read_text())
    assert written["step"] == 1 and written["num_updates"] == 1


def test_a_run_that_loses_its_directory_as_a_checkpoint_gets_its_name_removes_no_older_one(model, tmp_path):
    run = made_run(model, tmp_path, max_actor_ckpt_to_keep=1)
    trained(run)
    run.saver.save_last(run.state)
    looks = []

    def lost_after_a_look():
        looks.append(True)
        if len(looks) > 1:
            raise LostLock("another has it")

    run.saver._check = lost_after_a_look
    trained(run)
    run.saver.save(run.state)
    with pytest.raises(LostLock):
        run.saver.finished(wait=True)
    run.saver.close()
    assert sorted(folder.name for folder in run.folder.iterdir()) == ["step-1", "step-2"]


@pytest.mark.parametrize("when", ["begun before", "asked for after"])
def test_a_run_that_lost_its_directory_names_and_removes_no_checkpoint(model, tmp_path, when):
    """Unlike a full disk it ends the run."""
    run = made_run(model, tmp_path, max_actor_ckpt_to_keep=1)
    trained(run)
    run.saver.save_last(run.state)
    before = bytes_below(tmp_path)

    def lost():
        raise LostLock("another has it")

    if when == "begun before":
        run.actor.may_write.clear()
    else:
        run.saver._check = lost
    trained(run)
    run.saver.save(run.state)
    run.saver._check = lost
    run.actor.may_write.set()
    with pytest.raises(LostLock):
        run.saver.finished(wait=True)
    assert bytes_below(tmp_path) == before
    with pytest.raises(LostLock):
        run.saver.save_last(run.state)
    assert bytes_below(tmp_path) == before
    run.saver.close()
