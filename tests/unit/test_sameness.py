"""Two runs are the same only when every bit is, and what differs first is named."""

import json
import os
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mrl.checkpoint.manifest import EXP_AVG, Manifest, RankFiles, StoredTensor, file_facts, write_manifest
from mrl.cli.main import main
from mrl.errors import EnvironmentFault, Interrupted
from mrl.model.boxes import Box
from mrl.model.megatron_shards import Piece
from mrl.record.run_dir import RunDir
from mrl.tools import compare_runs, own_command
from mrl.tools.compare_runs import checkpoint_difference, metrics_difference

WHOLE = Box.whole((2, 3))


def checkpoint(folder: Path, values: torch.Tensor, **changes) -> Path:
    """One rank with one moment [2, 3]."""
    folder.mkdir(parents=True)
    file = folder / "rank-00000.safetensors"
    save_file({"exp_avg/0.w": values}, file)
    entry = StoredTensor(file.name, "exp_avg/0.w", EXP_AVG, (2, 3), None, (Piece("model.w", WHOLE, WHOLE),))
    facts = {"num_updates": 2, "step": 2.0, "lr": 0.5} | changes.pop("optimizer", {})
    rank = RankFiles((entry,), {file.name: file_facts(file)}, facts)
    fields = {
        "step": 2,
        "layout": {"world_size": 1},
        "dtype": "float32",
        "hf_config": {},
        "trainer": {"cursor": {"epoch": 0, "index": 8}},
    }
    write_manifest(folder, Manifest(ranks=(rank,), versions={}, **fields | changes))
    return folder


def test_equal_checkpoints_have_no_difference_whatever_the_versions_say(tmp_path):
    values = torch.arange(6.0).reshape(2, 3)
    assert checkpoint_difference(checkpoint(tmp_path / "a", values), checkpoint(tmp_path / "b", values.clone())) is None


def test_a_single_bit_is_named_with_its_place_in_the_model(tmp_path):
    values = torch.ones(2, 3)
    other = values.clone()
    other[1, 2] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    found = checkpoint_difference(checkpoint(tmp_path / "a", values), checkpoint(tmp_path / "b", other))
    assert found.startswith(
        "rank-00000.safetensors, exp_avg/0.w (model.w): 1 of 6 elements, first [1, 2]: 1.0 and 1.00000011"
    )


def test_a_zero_of_another_sign_is_a_difference_too(tmp_path):
    found = checkpoint_difference(
        checkpoint(tmp_path / "a", torch.zeros(2, 3)), checkpoint(tmp_path / "b", -torch.zeros(2, 3))
    )
    assert "sign of zero" in found


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"optimizer": {"lr": 0.25}}, "optimizer lr: 0.5 and 0.25"),
        ({"trainer": {"cursor": {"epoch": 1, "index": 8}}}, "place in the data"),
        ({"layout": {"world_size": 1, "expert_tensor_parallel_size": 1}}, "layout"),
    ],
)
def test_what_surrounds_the_tensors_counts(tmp_path, changes, named):
    values = torch.ones(2, 3)
    assert named in checkpoint_difference(
        checkpoint(tmp_path / "a", values), checkpoint(tmp_path / "b", values, **changes)
    )


def test_a_damaged_checkpoint_is_no_difference_but_a_fault(tmp_path):
    one, other = (checkpoint(tmp_path / name, torch.ones(2, 3)) for name in "ab")
    file = other / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(EnvironmentFault, match="SHA-256"):
        checkpoint_difference(one, other)


def test_times_are_no_part_of_metrics_and_everything_else_is():
    line = {
        "training/global_step": 1,
        "actor/lr": 0.5,
        "timing_s/step": 1.0,
        "perf/throughput": 3.0,
        "reshard/seconds": 1.0,
        "tools/calculator/seconds": 0.1,
        "tools/calculator/calls": 3.0,
    }
    slower = line | {"timing_s/step": 9.0, "perf/throughput": 1.0, "reshard/seconds": 2.0}
    slower["tools/calculator/seconds"] = 0.4
    assert metrics_difference([line], [slower]) is None
    assert "calculator/calls" in metrics_difference([line], [line | {"tools/calculator/calls": 4.0}])
    nan = line | {"actor/lr": float("nan")}
    assert metrics_difference([nan], [dict(nan)]) is None
    assert metrics_difference([line], [line | {"actor/lr": 0.25}]) == "metrics: actor/lr of step 1 is 0.5 and 0.25"
    assert (
        metrics_difference([line], [line | {"actor/pg_loss": 1.0}])
        == "metrics: actor/pg_loss of step 1 is None and 1.0"
    )
    missing = {"fleet/engines_ready": 1.0, "reshard/engines": 1.0}
    whole = {"fleet/engines_ready": 2.0, "reshard/engines": 2.0}
    assert metrics_difference([line | missing], [line | whole]) is None, "of a step in which an engine was missing"
    unlike = whole | {"reshard/engines": 1.0}
    assert "reshard/engines" in metrics_difference([line | unlike], [line | whole]), "in which none was"
    assert metrics_difference([line | unlike | {"fleet/lost": 1.0}], [line | whole]) is None
    assert "actor/lr" in metrics_difference([line | missing], [line | whole | {"actor/lr": 0.25}])
    assert metrics_difference([line | {"drafts/acceptance": 0.5}], [line]) is None, "a validation's drafts count"
    assert "steps [1] and [1, 2]" in metrics_difference([line], [line, line | {"training/global_step": 2}])


class FakeTraining:
    """Stands in for `mrl train`: writes lines and checkpoints; `resumed_lr` is what a resumed run computes."""

    def __init__(self, resumed_lr: float = 0.5):
        self.resumed_lr, self.calls = resumed_lr, []

    def __call__(self, config: Path, run: RunDir, steps: int, log: Path, *more: str) -> None:
        self.calls.append(more)
        first = steps + 1 if more else 1
        assert [p.name for p in sorted(run.checkpoints.glob("*"))] == ([f"step-{steps}"] if more else [])
        rows = run.metrics.read_text().splitlines()[:steps] if more else []
        for step in range(first, 2 * steps + 1):
            lr = self.resumed_lr if more else 0.5
            rows.append(json.dumps({"training/global_step": step, "actor/lr": lr, "timing_s/step": len(self.calls)}))
            if step % steps == 0:
                checkpoint(run.checkpoints / f"step-{step}", torch.full((2, 3), lr * step), step=step)
        run.path.mkdir(parents=True, exist_ok=True)
        run.metrics.write_text("\n".join(rows) + "\n")


@pytest.fixture
def verify(tmp_path, monkeypatch, capfd):
    """`mrl verify --resume` with the trainings faked: exit code and what it printed."""

    def verify(training, *arguments: str) -> tuple[int, str]:
        from small_model import write_model

        write_model(tmp_path / "model")
        (tmp_path / "train.jsonl").write_text("{}\n")
        monkeypatch.setattr(compare_runs, "_train", training)
        monkeypatch.chdir(tmp_path)
        preset = Path(__file__).resolve().parents[2] / "parallel_configs" / "tiny-moe" / "cpu.yaml"
        values = ("model.path=model", "data.train_files=train.jsonl", "data.val_files=[]", "trainer.test_freq=-1")
        sets = [text for value in values for text in ("--set", value)]
        try:
            main(["verify", str(preset), "--resume", *sets, *arguments])
            code = 0
        except SystemExit as ended:
            code = ended.code
        assert not list(tmp_path.glob("**/*verify-resume*")), "the folder of the check is left behind"
        out = capfd.readouterr()
        return code, out.out + out.err

    return verify


def test_a_run_that_resumes_exactly_is_said_to(verify):
    training = FakeTraining()
    code, said = verify(training, "--steps", "3")
    assert code == 0 and "ok: not one bit differs" in said and "6 steps" in said
    assert training.calls == [(), ("--resume",)]


def test_a_run_that_does_not_is_refuted_with_the_first_difference(verify):
    code, said = verify(FakeTraining(resumed_lr=0.25), "--json")
    found = json.loads(said)
    assert code == 1 and not found["ok"] and found["difference"] == "metrics: actor/lr of step 3 is 0.5 and 0.25"


def test_a_training_that_fails_ends_the_check_with_its_own_exit_code(verify):
    def train(config, run, steps, log, *more):
        raise Interrupted("the run ended with exit code 5")

    code, said = verify(train)
    assert code == 5 and "exit code 5" in said


def test_a_real_process_that_fails_is_told_with_its_last_words(tmp_path):
    (tmp_path / "config.yaml").write_text("nothing: 1\n")
    with pytest.raises(compare_runs.MrlError, match=r"(?s)ended with exit code 2:.*nothing"):
        compare_runs._train(tmp_path / "config.yaml", RunDir(tmp_path / "run"), 1, tmp_path / "log")


def test_the_process_that_trains_is_told_every_setting_once(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(compare_runs, "run_mrl", lambda arguments, log: commands.append(arguments) or 0)
    compare_runs._train(tmp_path / "config.yaml", RunDir(tmp_path / "run"), 3, tmp_path / "log", "--resume")
    (command,) = commands
    keys = [after.partition("=")[0] for word, after in pairwise(command) if word == "--set"]
    assert len(keys) == len(set(keys)) > 0 and command.count("--resume") == 1
    assert "trainer.total_training_steps=6" in command and "trainer.save_freq=3" in command


def test_a_check_that_is_stopped_leaves_no_training_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(own_command, "PROGRAM", "import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    log = tmp_path / "log"

    def stop_when_it_trains() -> None:
        while not (log.is_file() and log.read_text().strip()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_it_trains, daemon=True).start()
    with pytest.raises(Interrupted, match="SIGTERM"):
        compare_runs._train(tmp_path / "config.yaml", RunDir(tmp_path / "run"), 1, log)
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


@pytest.mark.parametrize(
    ("text", "fault"),
    [("0", "must be at least 1"), ("-1", "must be at least 1"), ("two", "'two' is not a whole number")],
)
def test_steps_are_a_number_of_them(text, fault, capfd):
    with pytest.raises(SystemExit) as ended:
        main(["verify", "x.yaml", "--resume", "--steps", text])
    assert ended.value.code == 2 and f"argument --steps: {fault}" in capfd.readouterr().err
