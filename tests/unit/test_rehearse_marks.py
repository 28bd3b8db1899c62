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
from mrl.config.schema import RunConfig
from mrl.errors import Interrupted
from mrl.model import model_spec
from mrl.model.adapters import Lora, adapter_shards
from mrl.model.layout import TrainLayout
from mrl.model.megatron_shards import source_shards
from mrl.model.registry import known_hf_config
from mrl.record.spec import all_metrics, metric_spec
from mrl.tools import own_command
from mrl.tools.rehearse import stages
from mrl.tools.rehearse.compose import Rehearsal, WorkFolder, compose
from mrl.tools.rehearse.evidence import evidence_of
from mrl.tools.rehearse.marks import SWITCHES, judge
from mrl.tools.rehearse.scoring import CALL
from mrl.tools.rehearse.small_model import small_hf_config
from mrl.tools.rehearse.watched import WATCHED

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
    "rollout.tensor_model_parallel_size=1", "rollout.data_parallel_size=1", "data.val_files=[val.parquet]",
    "trainer.test_freq=5", "trainer.val_before_train=true",
    "algorithm.entropy_coeff=0.001", "actor.override_ddp_config={overlap_grad_reduce: true}",
)  # fmt: skip


def rehearsal_of(folder: Path, *overrides: str) -> Rehearsal:
    return compose(load_config(SEPARATE, overrides=overrides).config, WorkFolder(folder), cpus=2)


def write_run(rehearsal: Rehearsal, run: Path) -> None:
    """A run directory in which everything left its mark."""
    (run / "logs").mkdir(parents=True)
    named = {spec.name.replace("*", "x"): 0.5 for spec in all_metrics() if not spec.name.startswith("switch/")}
    small = rehearsal.config.rollout
    named |= {"reshard/workers": small.num_engines * small.workers_per_engine, "reshard/engines": small.num_engines}
    named |= {"offload/parameters_bytes": 1.0, "offload/gradients_bytes": 1.0, "offload/optimizer_bytes": 1.0}
    named |= {"rollout_corr/weight_mean": 1.0}
    lines = [json.dumps(named | {"training/global_step": step}) for step in range(3)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run / "logs" / "reward.log").write_text(
        json.dumps({CALL: {"row": 0, "own": 0.0, "given": 1.0, "kind": "a float"}}) + "\n"
    )
    write_names(run, names_of(rehearsal.config))
    write_checkpoints(rehearsal, run)


def names_of(config: RunConfig) -> list[str]:
    """What the code of every switch says when it runs."""
    algorithm, transformer = config.algorithm, config.model.override_transformer_config
    return [
        f"algorithm.adv_estimator={algorithm.adv_estimator}",
        f"algorithm.policy_loss.loss_mode={algorithm.policy_loss.loss_mode}",
        *[f"algorithm.anchor={algorithm.anchor}"] * (algorithm.anchor != "recompute"),
        f"model.override_transformer_config.recompute_granularity={transformer.get('recompute_granularity')}",
        f"actor.router_replay={config.actor.router_replay}",
        "actor.freeze_router",
        "actor.override_ddp_config.overlap_grad_reduce",
        "ref.param_offload",
    ]


def write_names(run: Path, names: list[str]) -> None:
    """As two ranks and a driver leave them."""
    (run / "exercised").mkdir(parents=True, exist_ok=True)
    for process in (11, 12, 13):
        (run / "exercised" / f"{process}.txt").write_text("".join(f"{name}\n" for name in names))


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


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "gate_proj"]])
def test_files_of_adapters_say_how_they_are_cut_too(tmp_path, targets):
    hf_config = small_hf_config(known_hf_config("Qwen3-30B-A3B"), 4, 320, 512)
    model = model_spec(hf_config)
    lora = Lora.of(4, 8.0, targets)
    degrees = {
        "world_size": 16, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2,
    }  # fmt: skip
    layout = TrainLayout.build(degrees, model)
    folder = tmp_path / "run" / "checkpoints" / "step-1"
    folder.mkdir(parents=True)
    ranks = []
    for rank in range(layout.world_size):
        name = f"rank-{rank}.safetensors"
        (folder / name).write_bytes(b"x")
        shards = [shard for shard in adapter_shards(model, layout, rank, lora) if shard.primary == rank]
        entries = tuple(StoredTensor(name, s.megatron_name, WEIGHT, s.local_shape, None, s.pieces) for s in shards)
        ranks.append(RankFiles(entries, {name: {"bytes": 1}}, {"num_updates": 1}))
    said = {"rank": 4, "alpha": 8.0, "target_modules": targets}
    write_manifest(folder, Manifest(1, degrees, "bfloat16", hf_config, tuple(ranks), {}, {}, adapters=said))
    found = evidence_of(tmp_path / "run", tmp_path).degrees
    assert found == {"ranks": 16, "tensor": 2, "pipeline": 2, "expert": 2, "expert_tensor": 2}


def without(run: Path, pattern: str, folder: Path) -> Path:
    """The run directory again, without metrics and code of these names."""
    folder.mkdir()
    said = (run / "exercised" / "11.txt").read_text().splitlines()
    write_names(folder, [name for name in said if not re.fullmatch(pattern, name)])
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
    return {entry.switch for entry in judged(rehearsal, run)[0]}


def judged(rehearsal: Rehearsal, run: Path):
    return judge(rehearsal, evidence_of(run, run / "exercised"))


def test_with_every_mark_there_all_but_those_without_one_count(rehearsal, run):
    counted, lost = judged(rehearsal, run)
    assert {e.switch for e in lost if "no mark" in e.why} == {
        "rollout.enable_prefix_caching",
        "actor.override_ddp_config.overlap_param_gather",
    }
    assert len(counted) > 25 and all(entry.mark for entry in counted)


def test_a_run_that_left_nothing_exercised_nothing(rehearsal, tmp_path):
    counted, lost = judged(rehearsal, tmp_path / "nothing")
    on = {switch.name for switch in SWITCHES if switch.value_in(rehearsal.config) is not None}
    assert counted == [] and on <= {entry.switch for entry in lost}


METRIC_OF = {
    "actor.param_offload": "offload/parameters_bytes", "actor.grad_offload": "offload/gradients_bytes",
    "actor.optimizer_offload": "offload/optimizer_bytes",
    "actor.use_dynamic_bsz": "actor/token_budget_share", "actor.use_remove_padding": "actor/packed_sequences",
    "algorithm.use_kl_loss": "actor/kl_loss", "algorithm.overlong_buffer": "train/overlong_penalty_mean",
    "algorithm.overlong_filter": "train/overlong_filtered_share",
    "algorithm.rollout_correction": "rollout_corr/weight_mean",
    "algorithm.entropy_coeff": "actor/entropy_loss", "trainer.test_freq": "val-core/.*",
    "rollout.num_engines": "reshard/engines", "reshard.path": "reshard/verified",
    "algorithm.filter_groups": "train/(num_gen_batches|uniform_group_share)",
}  # fmt: skip
SAID_BY_CODE = (
    "algorithm.adv_estimator", "algorithm.policy_loss.loss_mode", "actor.router_replay", "actor.freeze_router",
    "actor.override_ddp_config.overlap_grad_reduce", "ref.param_offload",
    "model.override_transformer_config.recompute_granularity",
)  # fmt: skip
MARKED_BY = METRIC_OF | {switch: f"{re.escape(switch)}(=.*)?" for switch in SAID_BY_CODE}


@pytest.mark.parametrize("switch", MARKED_BY)
def test_without_its_mark_a_switch_does_not_count(switch, rehearsal, run, counted, tmp_path):
    less = without(run, MARKED_BY[switch], tmp_path / "less")
    assert counted - exercised(rehearsal, less) == {switch}


OTHERS = {
    "algorithm.adv_estimator": "rloo",
    "algorithm.policy_loss.loss_mode": "vanilla",
    "actor.router_replay": "R3",
    "model.override_transformer_config.recompute_granularity": "None",
}


@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize("switch", OTHERS)
def test_a_value_counts_when_its_code_alone_ran(switch, also, rehearsal, run, counted, tmp_path):
    """Whatever the configuration names: gradients and advantages say nothing of which function made them."""
    other = without(run, "" if also else MARKED_BY[switch], tmp_path / "other")
    (other / "exercised" / "14.txt").write_text(f"{switch}={OTHERS[switch]}\n")
    assert counted - exercised(rehearsal, other) == {switch}


def test_a_name_that_a_killed_process_did_not_finish_is_no_mark(rehearsal, run, counted, tmp_path):
    less = without(run, MARKED_BY["actor.freeze_router"], tmp_path / "less")
    (less / "exercised" / "14.txt").write_text("actor.freeze_router")
    assert counted - exercised(rehearsal, less) == {"actor.freeze_router"}


def test_what_the_table_waits_for_is_watched_and_nothing_else():
    assert {row.switch for row in WATCHED} == {switch.name for switch in SWITCHES if switch.mark is None}


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
    less = without(tmp_path / "run", "algorithm.anchor=.*", tmp_path / "less")
    assert whole - exercised(asked, less) == {"algorithm.anchor"}


def test_degrees_are_read_off_the_boxes_of_the_files(run):
    assert evidence_of(run, run / "exercised").degrees == {
        "ranks": 4,
        "tensor": 2,
        "pipeline": 2,
        "expert": 2,
        "expert_tensor": 1,
    }


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
    for name in METRIC_OF.values():
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
    assert code == 2 and "holds something other than a rehearsal" in said and (tmp_path / "notes.txt").exists()


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
        "from pathlib import Path\nfrom mrl.tools.rehearse import stages\nfrom "
        "mrl.tools.rehearse.compose import WorkFolder\n"
        "from mrl.tools import own_command\n"
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


def test_a_rehearsal_joins_no_cluster_of_the_users_and_sees_what_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    environment = stages.environment(WorkFolder(tmp_path))
    assert "RAY_ADDRESS" not in environment and environment["HF_HUB_OFFLINE"] == "1"
    assert environment["PYTHONPATH"].startswith(str(tmp_path / "hook"))
