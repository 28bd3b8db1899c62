"""A switch counts as exercised only when its mark is in the run directory; what breaks is told with the log's place."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mrl.checkpoint.manifest import WEIGHT, Manifest, RankFiles, StoredTensor, write_manifest
from mrl.cli.main import main
from mrl.config.load import load_config
from mrl.errors import Interrupted
from mrl.extras.rehearse import stages
from mrl.extras.rehearse.compose import Rehearsal, WorkFolder, compose
from mrl.extras.rehearse.evidence import evidence_of
from mrl.extras.rehearse.marks import SWITCHES, judge
from mrl.extras.rehearse.scoring import CALL
from mrl.extras.rehearse.small_model import small_hf_config
from mrl.model import model_spec
from mrl.model.layout import TrainLayout
from mrl.model.megatron_shards import source_shards
from mrl.model.registry import known_hf_config
from mrl.record.spec import METRICS, metric_spec
from mrl.train import own_command

FOLDER = Path(__file__).parents[2] / "parallel_configs"
SEPARATE = FOLDER / "qwen3-30b-a3b" / "h100-4x8-separate.yaml"
ALL_ON = (
    "actor.layout={world_size: 8, tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, "
    "expert_model_parallel_size: 2}",
    "actor.param_offload=true", "actor.grad_offload=true", "actor.optimizer_offload=true", "actor.use_dynamic_bsz=true",
    "actor.ppo_max_token_len_per_gpu=10240", "actor.ppo_micro_batch_size_per_gpu=8",
    "actor.log_prob_micro_batch_size_per_gpu=null",
    "actor.router_replay=R2", "actor.freeze_router=true", "algorithm.use_kl_loss=true", "algorithm.kl_loss_coef=0.1",
    "ref.param_offload=true", "algorithm.filter_groups.enable=true", "algorithm.overlong_buffer.enable=true",
    "algorithm.overlong_filter=true", "algorithm.rollout_correction={level: token, high: 2.0}", "rollout.num_engines=2",
    "rollout.tensor_model_parallel_size=1", "data.val_files=[val.parquet]", "trainer.test_freq=5",
    "trainer.val_before_train=true",
    "algorithm.entropy_coeff=0.001", "actor.override_ddp_config={overlap_grad_reduce: true}",
)  # fmt: skip


def rehearsal_of(folder: Path, *overrides: str) -> Rehearsal:
    return compose(load_config(SEPARATE, overrides=overrides).config, WorkFolder(folder), cpus=2)


def write_run(rehearsal: Rehearsal, run: Path) -> None:
    """A run directory in which everything left its mark."""
    (run / "logs").mkdir(parents=True)
    named = {spec.name.replace("*", "x"): 0.5 for spec in METRICS if not spec.name.startswith(("switch/", "ran/"))}
    algorithm = rehearsal.config.algorithm
    named |= {
        f"ran/adv_estimator/{algorithm.adv_estimator}": 8.0,
        f"ran/policy_loss/{algorithm.policy_loss.loss_mode}": 8.0,
    }
    named |= {f"ran/anchor/{algorithm.anchor}": 8.0} if algorithm.anchor != "recompute" else {}
    small = rehearsal.config.rollout
    named |= {"reshard/workers": small.num_engines * small.workers_per_engine, "reshard/engines": small.num_engines}
    named |= {"offload/parameters_bytes": 1.0, "offload/gradients_bytes": 1.0, "offload/optimizer_bytes": 1.0}
    named |= {"offload/reference_bytes": 1.0, "rollout_corr/weight_mean": 1.0}
    lines = [json.dumps(named | {"training/global_step": step}) for step in range(3)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run / "logs" / "reward.log").write_text(
        json.dumps({CALL: {"row": 0, "own": 0.0, "given": 1.0, "kind": "a float"}}) + "\n"
    )
    write_checkpoints(rehearsal, run)


def write_checkpoints(rehearsal: Rehearsal, run: Path) -> None:
    """Manifests whose files are cut as the layout's ranks hold them."""
    hf_config = small_hf_config(known_hf_config("Qwen3-30B-A3B"), rehearsal.layout.layers, 320, 512)
    model, degrees = model_spec(hf_config), rehearsal.config.actor.layout.model_dump()
    layout = TrainLayout.build(degrees, model)
    for step, updates in ((1, 4), (2, 8)):
        ranks = tuple(_files(rank, model, layout, updates) for rank in range(layout.world_size))
        folder = run / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        for rank in range(layout.world_size):
            (folder / f"rank-{rank}.safetensors").write_bytes(b"x")
        write_manifest(folder, Manifest(step, degrees, "bfloat16", hf_config, ranks, {}, {}))


def _files(rank: int, model, layout: TrainLayout, updates: int) -> RankFiles:
    entries = tuple(
        StoredTensor(f"rank-{rank}.safetensors", shard.megatron_name, WEIGHT, shard.local_shape, None, shard.pieces)
        for shard in source_shards(model, layout, rank)
    )
    return RankFiles(entries, {f"rank-{rank}.safetensors": {"bytes": 1}}, {"num_updates": updates})


def without_metrics(run: Path, pattern: str, folder: Path) -> Path:
    """The run directory again, without metrics of these names."""
    folder.mkdir()
    for name in ("logs", "checkpoints"):
        (folder / name).symlink_to(run / name)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [json.dumps({name: value for name, value in row.items() if not re.fullmatch(pattern, name)}) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    return folder


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory) -> Rehearsal:
    return rehearsal_of(tmp_path_factory.mktemp("work"), *ALL_ON)


@pytest.fixture(scope="module")
def run(rehearsal, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    write_run(rehearsal, folder)
    return folder


@pytest.fixture(scope="module")
def counted(rehearsal, run) -> set[str]:
    return exercised(rehearsal, run)


def exercised(rehearsal: Rehearsal, run: Path) -> set[str]:
    return {entry.switch for entry in judge(rehearsal, evidence_of(run))[0]}


def test_with_every_mark_there_all_but_those_without_one_count(rehearsal, run):
    counted, lost = judge(rehearsal, evidence_of(run))
    assert {e.switch for e in lost if "no mark" in e.why} == {"rollout.enable_prefix_caching"}
    assert len(counted) > 25 and all(entry.mark for entry in counted)


def test_a_run_that_left_nothing_exercised_nothing(rehearsal, tmp_path):
    counted, lost = judge(rehearsal, evidence_of(tmp_path / "nothing"))
    on = {switch.name for switch in SWITCHES if switch.value(rehearsal.config) is not None}
    assert counted == [] and on <= {entry.switch for entry in lost}


MARKED_BY = {
    "actor.param_offload": "offload/parameters_bytes", "actor.grad_offload": "offload/gradients_bytes",
    "actor.optimizer_offload": "offload/optimizer_bytes", "ref.param_offload": "offload/reference_bytes",
    "actor.use_dynamic_bsz": "actor/token_budget_share", "actor.use_remove_padding": "actor/packed_sequences",
    "model.override_transformer_config.recompute_granularity": "actor/recomputed_layers",
    "actor.override_ddp_config.overlap_grad_reduce": "actor/early_reductions",
    "actor.freeze_router": "router/frozen",
    "algorithm.use_kl_loss": "actor/kl_loss", "algorithm.overlong_buffer": "train/overlong_penalty_mean",
    "algorithm.overlong_filter": "train/overlong_filtered_share",
    "algorithm.rollout_correction": "rollout_corr/weight_mean",
    "actor.router_replay": "router/drift", "algorithm.entropy_coeff": "actor/entropy_loss",
    "trainer.test_freq": "val-core/.*",
    "algorithm.adv_estimator": "ran/adv_estimator/.*", "algorithm.policy_loss.loss_mode": "ran/policy_loss/.*",
    "rollout.num_engines": "reshard/engines", "reshard.path": "reshard/verified",
    "algorithm.filter_groups": "train/(num_gen_batches|uniform_group_share)",
}  # fmt: skip


@pytest.mark.parametrize("switch", MARKED_BY)
def test_without_its_mark_a_switch_does_not_count(switch, rehearsal, run, counted, tmp_path):
    less = without_metrics(run, MARKED_BY[switch], tmp_path / "less")
    assert counted - exercised(rehearsal, less) == {switch}


OTHERS_RAN = {
    "algorithm.adv_estimator": "ran/adv_estimator/rloo",
    "algorithm.policy_loss.loss_mode": "ran/policy_loss/vanilla",
}


@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize("switch", OTHERS_RAN)
def test_a_loss_or_an_estimator_counts_when_it_alone_trained_the_responses(
    switch, also, rehearsal, run, counted, tmp_path
):
    """Whatever the configuration names: gradients and advantages say nothing of which function made them."""
    other = without_metrics(run, "" if also else MARKED_BY[switch], tmp_path / "other")
    rows = [json.loads(line) | {OTHERS_RAN[switch]: 8.0} for line in (other / "metrics.jsonl").read_text().splitlines()]
    (other / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert counted - exercised(rehearsal, other) == {switch}


@pytest.mark.parametrize("anchor", ["rollout", "on_policy"])
def test_an_anchor_counts_by_its_own_mark_and_not_by_a_policy_that_moved(anchor, tmp_path):
    off = (
        "algorithm.rollout_correction={level: null, high: 2.0}",
        "actor.router_replay=R3",
        f"algorithm.anchor={anchor}",
    )
    one_update = ("data.train_batch_size=64", "actor.ppo_mini_batch_size=64") if anchor == "on_policy" else ()
    asked = rehearsal_of(tmp_path / "work", *ALL_ON, *off, *one_update)
    write_run(asked, tmp_path / "run")
    whole = exercised(asked, tmp_path / "run")
    assert {"algorithm.anchor", "actor.router_replay"} <= whole
    less = without_metrics(tmp_path / "run", "ran/anchor/.*", tmp_path / "less")
    assert whole - exercised(asked, less) == {"algorithm.anchor"}


def test_degrees_are_read_off_the_boxes_of_the_files(run):
    assert evidence_of(run).degrees == {"ranks": 4, "tensor": 2, "pipeline": 2, "expert": 2, "expert_tensor": 1}


def test_a_checkpoint_that_is_cut_otherwise_is_no_mark(tmp_path):
    """Files of four data-parallel ranks, where tensor and expert parallelism were asked for."""
    asked = rehearsal_of(tmp_path, *ALL_ON)
    flat = rehearsal_of(
        tmp_path, "actor.layout={world_size: 4, tensor_model_parallel_size: 1, expert_model_parallel_size: 1}"
    )
    write_checkpoints(replace(flat, layout=asked.layout), tmp_path / "run")
    layout = {
        "actor.layout.tensor_model_parallel_size",
        "actor.layout.pipeline_model_parallel_size",
        "actor.layout.expert_model_parallel_size",
    }
    assert not layout & exercised(asked, tmp_path / "run")


def test_a_resume_that_began_anew_is_no_mark(rehearsal, tmp_path):
    write_checkpoints(rehearsal, tmp_path / "run")
    assert "--resume" in exercised(rehearsal, tmp_path / "run")
    file = tmp_path / "run" / "checkpoints" / "step-2" / "manifest.json"
    file.write_text(file.read_text().replace('"num_updates": 8', '"num_updates": 4'))
    assert "--resume" not in exercised(rehearsal, tmp_path / "run")


def test_a_schedule_counts_when_the_rate_changed(tmp_path):
    decaying = rehearsal_of(tmp_path, "actor.optim.lr_decay_style=cosine")
    for name, rates in (("same", (1e-6, 1e-6)), ("falling", (1e-6, 5e-7))):
        (tmp_path / name).mkdir()
        lines = [json.dumps({"training/global_step": step, "actor/lr": rate}) for step, rate in enumerate(rates, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        assert ("actor.optim.lr_decay_style" in exercised(decaying, tmp_path / name)) == (name == "falling")


def test_every_metric_of_a_mark_is_declared():
    for name in MARKED_BY.values():
        metric_spec(name.replace(".*", "x/mean@1") if "(" not in name else "train/num_gen_batches")


# ---------------------------------------------------------------- the command


def rehearse(capsys, *arguments: str) -> tuple[int, str, str]:
    try:
        main(["rehearse", *arguments])
        code = 0
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    return code, said.out, said.err


def test_what_validate_refuses_is_refused_alike(capsys, tmp_path):
    broken = ("--set", "actor.layout.pipeline_model_parallel_size=5", "--set", "actor.ppo_mini_batch_size=7")
    code, _, said = rehearse(capsys, str(SEPARATE), "--work", str(tmp_path / "w"), *broken)
    with pytest.raises(SystemExit) as end:
        main(["validate", str(SEPARATE), "--json", *broken])
    violations = [violation["rule"] for violation in json.loads(capsys.readouterr().out)["violations"]]
    assert code == end.value.code == 2 and len(violations) > 1 and all(rule in said for rule in violations)
    assert not (tmp_path / "w").exists()


def test_a_folder_of_somebody_elses_is_left_alone(capsys, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    code, _, said = rehearse(capsys, str(SEPARATE), "--work", str(tmp_path))
    assert code == 2 and "holds something else than a rehearsal" in said and (tmp_path / "notes.txt").exists()


def test_a_reward_that_raises_ends_as_a_run_would(capsys, tmp_path):
    (tmp_path / "bad.py").write_text("def compute_score(*args, **kwargs):\n    raise KeyError('oops')\n")
    reward = f"reward.custom_reward_function.path={tmp_path / 'bad.py'}"
    code, out, _ = rehearse(capsys, str(SEPARATE), "--work", str(tmp_path / "w"), "--json", "--set", reward)
    answer = json.loads(out)
    assert code == 3 and answer["ok"] is False and answer["exercised"] == answer["not_exercised"] == []
    assert answer["failed"][0]["phase"] == "prepare" and "KeyError: 'oops'" in answer["failed"][0]["why"]


FAILING = "import sys; print('loss: gspo'); print('mrl train: the cluster is too small: CPU'); sys.exit(4)"


def test_a_command_that_fails_is_told_with_its_message_its_code_and_the_place_in_its_log(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(own_command, "PROGRAM", FAILING)
    code, out, _ = rehearse(capsys, str(SEPARATE), "--work", str(tmp_path / "w"), "--json")
    answer = json.loads(out)
    assert code == 4 and answer["exercised"] == []
    assert answer["failed"] == [
        {"phase": "train", "why": "the cluster is too small: CPU", "log": f"{tmp_path / 'w' / 'train.log'}:2"}
    ]
    code, out, _ = rehearse(capsys, str(SEPARATE), "--work", str(tmp_path / "w"))
    assert (
        code == 4
        and f"BROKE in train ({tmp_path / 'w' / 'train.log'}:2)\n  the cluster is too small: CPU\nFAULT" in out
    )


def test_a_rehearsal_that_is_stopped_leaves_no_command_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(own_command, "PROGRAM", "import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    log = WorkFolder(tmp_path).log("train")

    def stop_when_it_runs() -> None:
        while not (log.is_file() and log.read_text().strip()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_it_runs, daemon=True).start()
    with pytest.raises(Interrupted, match="SIGTERM"):
        stages.run_stages(WorkFolder(tmp_path), lambda text: None)
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_command_that_hangs_is_ended_and_told(tmp_path, monkeypatch):
    monkeypatch.setattr(own_command, "PROGRAM", "import time; print('waiting', flush=True); time.sleep(60)")
    monkeypatch.setattr(stages, "DEADLINE_S", 1.0)
    work = WorkFolder(tmp_path)
    (ended,) = stages.run_stages(work, lambda text: None)
    assert ended.code is None and "no end after 1 s; waiting" in ended.why and ended.seconds < 20


def test_a_rehearsal_that_is_killed_takes_its_run_along(tmp_path):
    """The run says its number, and is gone soon after the rehearsal was."""
    waits = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    program = (
        "from pathlib import Path\nfrom mrl.extras.rehearse import stages\nfrom "
        "mrl.extras.rehearse.compose import WorkFolder\n"
        "from mrl.train import own_command\n"
        f"own_command.PROGRAM = {waits!r}\nstages.run_stages(WorkFolder(Path({str(tmp_path)!r})), print)\n"
    )
    rehearsing = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    log = tmp_path / "train.log"
    assert _within(30, lambda: log.exists() and log.read_text().strip())
    run = psutil.Process(int(log.read_text()))
    rehearsing.kill()
    rehearsing.wait()
    assert _within(10, lambda: not run.is_running() or run.status() == psutil.STATUS_ZOMBIE)


def _within(seconds: float, holds) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_a_command_that_claims_success_and_trained_nothing_is_a_fault(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(own_command, "PROGRAM", "print('fine')")
    code, out, _ = rehearse(capsys, str(SEPARATE), "--work", str(tmp_path / "w"), "--json")
    assert code == 1 and "0 of 2 steps" in json.loads(out)["failed"][0]["why"]


def test_a_rehearsal_joins_no_cluster_of_the_users(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert "RAY_ADDRESS" not in stages.environment() and stages.environment()["HF_HUB_OFFLINE"] == "1"
