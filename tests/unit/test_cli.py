"""The command line's manners: help, exit codes, machine-readable verdicts, values that arrive as they were given."""

import argparse
import io
import json
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_model import SIZES

from mrl.checkpoint.manifest import WEIGHT, Manifest, RankFiles, StoredTensor, file_facts, write_manifest
from mrl.cli.config_arguments import resolved_config
from mrl.cli.main import _Plain, main
from mrl.cli.train import _command as train_command
from mrl.driver.resume import what_is_left
from mrl.errors import Interrupted
from mrl.model import model_spec, tensor_specs
from mrl.model.layout import TrainLayout
from mrl.model.megatron_shards import source_shards

TINY = str(Path(__file__).resolve().parents[2] / "parallel_configs" / "tiny-moe" / "cpu.yaml")


@pytest.fixture
def mrl(capfd, tmp_path, monkeypatch):
    """Runs a command in a folder of its own: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SIZES))

    def mrl(*arguments: str) -> tuple[int, str, str]:
        code = 0
        try:
            main(arguments)
        except SystemExit as ended:
            code = ended.code
        return code, *capfd.readouterr()

    return mrl


@pytest.mark.parametrize(("arguments", "words"), [((), "validate"), (("convert",), "megatron-to-hf")])
def test_without_a_command_the_help_is_printed_and_the_exit_code_is_that_of_usage(mrl, arguments, words):
    code, out, err = mrl(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("usage: mrl") and words in err


def test_an_unknown_command_is_usage_too(mrl):
    code, _, err = mrl("trian")
    assert code == 2 and "invalid choice: 'trian'" in err


# --- validate ---------------------------------------------------------------------------------------------------------

OK = ("validate", TINY, "--set", "model.path=model")


def verdict(answer: tuple[int, str, str]) -> tuple[int, list[dict]]:
    code, out, err = answer
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert err == "" and set(found) == {"ok", "violations", "notes"} and found["ok"] == (not found["violations"])
    assert all(list(v) == ["field", "where", "value", "rule", "why", "allowed"] for v in found["violations"])
    return code, found["violations"]


def test_a_legal_configuration_validates(mrl):
    assert verdict(mrl(*OK, "--json")) == (0, [])
    code, out, _ = mrl(*OK)
    assert code == 0 and out.endswith("ok\n")
    # 64 prompts of 8 in mini-batches of 16 on TP2 over two ranks: all of a mini-batch's 128 samples on the one
    # data-parallel rank
    assert (
        "batch: 64 prompts x 8 = 512 samples a step, 4 updates of 128 samples, DP 1: 128 samples a "
        "rank, cut to 128 samples" in out
    )


def test_broken_rules_are_rows_with_the_values_that_would_hold(mrl):
    code, rows = verdict(mrl(*OK, "--json", "--set", "actor.ppo_mini_batch_size=3", "--set", "data.train_batch_size=4"))
    assert code == 2
    assert [(r["field"], r["where"], r["value"], r["allowed"]) for r in rows] == [
        ("actor.ppo_mini_batch_size", "--set", 3, [1, 2, 4])
    ]


def test_what_the_schema_refuses_is_in_the_same_rows_all_at_once(mrl):
    wrong = ("actor.lr=1", "rollout.n=many", "actor.optim.lr=.inf", "model.path=null")
    code, rows = verdict(mrl("validate", TINY, "--json", *[part for w in wrong for part in ("--set", w)]))
    assert code == 2
    assert {r["field"]: r["value"] for r in rows} == {
        "actor.lr": None,
        "rollout.n": "many",
        "actor.optim.lr": "inf",
        "model.path": None,
    }
    assert next(r["rule"] for r in rows if r["field"] == "actor.lr") == "unknown key; did you mean actor.optim.lr?"


def test_mistakes_of_the_schema_and_of_the_rules_come_in_one_answer(mrl):
    """An unknown key, a wrong type, a limit, a rule of one key, rules between keys and against the model,
    a device without figures.
    """
    wrong = {
        "actor.optim.lrr": "1", "rollout.n": "many", "actor.optim.clip_grad": "-1", "trainer.save_freq": "0",
        "actor.optim.min_lr": "1",
        "actor.ppo_mini_batch_size": "3", "actor.layout.tensor_model_parallel_size": "3", "cluster.accelerator": "b300",
    }  # fmt: skip
    code, rows = verdict(
        mrl(*OK, "--json", *(part for key, value in wrong.items() for part in ("--set", f"{key}={value}")))
    )
    assert code == 2 and set(wrong) <= {row["field"] for row in rows}
    schema_says = {row["field"]: row["rule"] for row in rows[:3]}
    assert set(schema_says) == {"actor.optim.lrr", "rollout.n", "actor.optim.clip_grad"}
    assert "did you mean lr?" in schema_says["actor.optim.lrr"]
    code, _, err = mrl("plan", *OK[1:], *(part for key, value in wrong.items() for part in ("--set", f"{key}={value}")))
    assert code == 2 and all(key in err for key in wrong if key != "cluster.accelerator")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("validate", "none.yaml", "--json"), 2, "none.yaml: cannot be read"),
        (("validate", TINY, "--json", "--set", "model.path=none"), 4, "none/config.json does not exist"),
        (("validate", TINY, "--json", "--recipe", "gpso"), 2, "did you mean gspo?"),
    ],
)
def test_what_cannot_be_judged_at_all_is_one_row_and_the_errors_own_exit_code(mrl, arguments, code, words):
    found, rows = verdict(mrl(*arguments))
    assert found == code and len(rows) == 1 and words in rows[0]["rule"]


def test_a_stop_while_commands_are_imported_is_told_in_one_line(monkeypatch, capsys):
    class Stops:
        def find_spec(self, name, *_):
            if name == "mrl.cli.watch":
                raise KeyboardInterrupt

    monkeypatch.delattr("mrl.cli.watch")
    monkeypatch.delitem(sys.modules, "mrl.cli.watch")
    monkeypatch.setattr(sys, "meta_path", [Stops(), *sys.meta_path])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("mrl.cli.main")
    assert stopped.value.code == Interrupted.exit_code and capsys.readouterr().err == "mrl: interrupted\n"


def test_a_command_whose_reader_has_gone_ends_as_any_other_does():
    preset = "parallel_configs/qwen3-30b-a3b/h100-4x8.yaml"
    command = [sys.executable, "-m", "mrl.cli.main", "plan", preset]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(30) == 128 + signal.SIGPIPE


@pytest.mark.parametrize("number", ["0", "-8", "100001", "100000000", "1e3"])
def test_a_number_of_devices_that_no_run_can_have_is_usage(mrl, number):
    code, _, err = mrl("plan", "--search", "--model", "Qwen3-0.6B", "--device", "h100-80g", "--devices", number)
    assert code == 2 and "argument --devices: " in err and "Traceback" not in err


def in_shell(redirected: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command in a shell, whose text has "$@" in place of the command."""
    command = [sys.executable, "-m", "mrl.cli.main", *arguments]
    return subprocess.run(["sh", "-c", redirected, "sh", *command], cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["completion", "bash"]])
def test_an_output_that_cannot_be_written_is_told_in_one_line(arguments):
    """/dev/full stands for a full disk, as in coreutils' tests/misc/write-errors.sh."""
    ended = in_shell('"$@" > /dev/full', *arguments)
    assert (ended.returncode, ended.stderr) == (4, "mrl: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize(
    ("closed", "arguments", "code"),
    [(">&-", ["completion", "bash"], 0), ("2>&-", ["validate", "none.yaml"], 2), ("<&- >&- 2>&-", ["--version"], 0)],
)
def test_closed_streams_are_as_the_null_device(closed, arguments, code):
    """As daemons start programs; files that a command opens must not get the number of its output."""
    ended = in_shell(f'"$@" {closed}', *arguments)
    assert (ended.returncode, ended.stderr) == (code, "")


def test_a_current_directory_that_is_gone_is_told_in_one_line(tmp_path):
    (tmp_path / "gone").mkdir()
    ended = in_shell('rmdir "$PWD"; exec "$@"', "validate", TINY, cwd=tmp_path / "gone")
    assert ended.returncode == 4 and ended.stderr.count("\n") == 1
    assert "the current directory cannot be used (No such file or directory)" in ended.stderr


def test_characters_that_a_terminal_has_not_are_written_as_escape_sequences():
    """PYTHONIOENCODING=latin-1, or the locale en_US.ISO-8859-1."""
    raw = io.BytesIO()
    stream = _Plain(io.TextIOWrapper(raw, encoding="latin-1", write_through=True))
    stream.write("größe 模\u2028")
    assert raw.getvalue() == "größe ".encode("latin-1") + b"\\u6a21\\u2028"


@pytest.mark.parametrize("given", ['"<eos>"', "[1, null]", "{}", "true", "1.5", "-1", "999999", "{", "\ufeff1"])
def test_a_response_ends_with_tokens_of_the_model(mrl, tmp_path, given):
    bom = given.startswith("\ufeff")
    text = "\ufeff" * bom + f'{{"eos_token_id": {given.removeprefix(chr(0xFEFF))}}}'
    (tmp_path / "model" / "generation_config.json").write_text(text)
    code, rows = verdict(mrl(*OK, "--json"))
    assert code == 2 and [row["field"] for row in rows] == ["model.path"]
    assert "generation_config.json" in rows[0]["rule"]


def test_checking_paths_wants_a_tokenizer(mrl, tmp_path):
    (tmp_path / "rows.jsonl").write_text("")
    code, rows = verdict(mrl(*OK, "--json", "--check-paths", "--set", "data.train_files=rows.jsonl"))
    assert code == 2 and ("model.path", "must have a tokenizer") in [(row["field"], row["rule"]) for row in rows]


def test_checking_paths_looks_into_the_weights(mrl, tmp_path):
    (tmp_path / "rows.jsonl").write_text("")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    arguments = (*OK, "--check-paths", "--set", "data.train_files=rows.jsonl", "--set", "data.val_files=rows.jsonl")
    code, _, err = mrl(*arguments)
    assert code == 4 and "no safetensors files there" in err


# --- train ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "folder", ["runs/a", "a: b", "x # y", "null", "1e3", "007", "[a]", "'quoted\"", "ü", "- a", "{a: 1}"]
)
def test_a_run_directory_arrives_as_it_was_given(folder):
    options = argparse.Namespace(config=TINY, recipe=None, overrides=[], run_dir=folder)
    assert resolved_config(options).config.trainer.run_dir == folder


def test_a_stopped_run_says_what_is_saved_and_the_command_that_goes_on(tmp_path, monkeypatch):
    options = argparse.Namespace(
        config="c.yaml", recipe="gspo", run_dir="runs/a b", overrides=["data.train_files=[x.parquet]"], resume=False
    )
    command = train_command(options)
    assert command == "mrl train c.yaml --recipe gspo --run-dir 'runs/a b' --set 'data.train_files=[x.parquet]'"
    assert what_is_left(tmp_path, command) == f"nothing of the run is there yet; it begins with: {command}"
    (tmp_path / "config.resolved.yaml").write_text("")
    assert what_is_left(tmp_path, command).endswith(f"begins anew in its folder with: {command} --resume")
    folder = tmp_path / "checkpoints" / "step-4"
    newest = SimpleNamespace(path=folder, manifest=SimpleNamespace(step=4))
    monkeypatch.setattr("mrl.driver.resume.newest_checkpoint", lambda _: newest)
    assert what_is_left(tmp_path, f"{command} --resume") == (
        f"saved: step 4 in {folder}; it goes on with: {command} --resume"
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["actor_rollout_ref.actor.clip_ratio=0.2"], ["algorithm.policy_loss.clip_ratio_low=0.2", "clip_ratio_high"]),
        (["clip_ratio=0.2"], ["algorithm.policy_loss.clip_ratio_low=0.2"]),
        (["actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.optim.lr=1e-6"], ["--set rollout.n=4", "optim.lr"]),
        (["trainer.save_freq=-5", "trainer.n_gpus_per_node=8"], ["--set cluster.n_gpus_per_node=8"]),
        (["actor_rollout_ref.model.lora_rank=8"], ["--set actor.lora.rank=8"]),
        (["actor_rollout_ref.model.mtp.enable=true"], ["has no key here: implied, the checkpoint's predicting layers"]),
        (["rollout.temprature=1"], ["did you mean temperature?"]),
        (["++actor_rollout_ref.actor.optim.lr=2e-6"], ["--set actor.optim.lr=2.0e-06"]),
        (["+rollout.n=4"], ["+rollout.n (--set): unknown key; write the key without hydra's +: --set rollout.n=4"]),
        (["+rollout.temprature=1"], ["unknown key; did you mean"]),
        (["data.custom_cls.path=a.py"], ["verl's data.custom_cls.path has no key here: unsupported"]),
        (["rollout.agent.num_workers=8"], ["unknown key; did you mean rollout.turns.num_workers?"]),
        (["reward.functoin=math"], ["did you mean function?"]),
        (["data.train_files=*.parquet"], ["not valid YAML", "into double quotes inside single ones"]),
        (["~trainer.logger"], ["--set ~trainer.logger: hydra's ~ removes a key", "--set KEY=null"]),
    ],
)
def test_a_key_of_verls_is_answered_with_ours(mrl, overrides, words):
    code, _, err = mrl("train", TINY, *(part for text in overrides for part in ("--set", text)))
    assert code == 2 and all(word in err for word in words) and "clip_ratio_c" not in err


def test_a_setting_without_set_is_answered_with_it(mrl):
    code, _, err = mrl("train", TINY, "trainer.total_epochs=2", "actor_rollout_ref.rollout.n=4")
    assert code == 2 and err.count("\n") == 1
    assert "--set trainer.total_epochs=2; verl's actor_rollout_ref.rollout.n is here --set rollout.n=4" in err
    assert "unrecognized arguments: nonsense" in mrl("train", TINY, "nonsense")[2]


@pytest.mark.parametrize("command", ["train", "validate", "plan", "submit"])
def test_hydras_signs_are_answered_wherever_a_configuration_is_given(mrl, command):
    code, _, err = mrl(command, TINY, "+rollout.n=4", "++actor_rollout_ref.rollout.n=4", "~trainer.logger")
    assert code == 2 and err.count("\n") == 1 and "usage" not in err, err
    assert (
        f"mrl {command}: a setting needs --set before it; --set rollout.n=4; verl's actor_rollout_ref.rollout.n" in err
    )
    assert (
        "trainer.logger: a key that is left out has its default; or --set trainer.logger=null, where it may be null"
        in err
    )


def test_what_is_wrong_with_a_jobs_arguments_is_said_as_of_mrl_submit(mrl):
    assert "mrl submit: error: unrecognized arguments: --nonsense" in mrl("submit", TINY, "--nonsense")[2]
    code, _, err = mrl("submit")
    assert code == 2 and "mrl submit: error: the following arguments are required: config" in err


# --- convert ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    """A saved step of one rank, made from weights that are all different, and those weights."""
    rng, spec = np.random.default_rng(0), model_spec(SIZES)
    weights = {t.name: rng.standard_normal(t.shape, np.float32) for t in tensor_specs(spec)}
    folder = tmp_path / "runs" / "one" / "checkpoints" / "step-3"
    (folder / "hf").mkdir(parents=True)
    (folder / "hf" / "config.json").write_text(json.dumps(SIZES))
    stored, entries = {}, []
    for shard in source_shards(spec, TrainLayout.build({"world_size": 1}, spec), 0):
        local = np.zeros(shard.local_shape, np.float32)
        for piece in shard.pieces:
            local[piece.local_box.slices] = weights[piece.hf_name][piece.hf_box.slices]
        stored[shard.megatron_name] = local
        entries.append(
            StoredTensor("rank-00000.safetensors", shard.megatron_name, WEIGHT, shard.local_shape, None, shard.pieces)
        )
    save_file(stored, folder / "rank-00000.safetensors")
    facts = {"rank-00000.safetensors": file_facts(folder / "rank-00000.safetensors")}
    write_manifest(
        folder, Manifest(3, {}, "float32", SIZES, (RankFiles(tuple(entries), facts, {"num_updates": 3}),), {}, {})
    )
    return folder, weights


def test_a_step_or_its_run_directory_converts_to_its_weights(mrl, checkpoint, tmp_path):
    folder, weights = checkpoint
    for number, source in enumerate((folder, folder.parents[1])):
        out = tmp_path / f"out{number}"
        code, said, _ = mrl("convert", "megatron-to-hf", str(source), "-o", str(out))
        assert code == 0 and f"wrote {len(weights)} tensors to {out}" in said
        found = load_file(out / "model-00001.safetensors")
        assert found.keys() == weights.keys() and all(np.array_equal(found[k], weights[k]) for k in weights)


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


DAMAGES = [
    (lambda f: flip_a_byte(f / "rank-00000.safetensors"), ["rank-00000.safetensors", "SHA-256"]),
    (lambda f: (f / "rank-00000.safetensors").unlink(), ["rank-00000.safetensors is missing"]),
    (lambda f: (f / "manifest.json").write_text("{"), ["manifest.json", "not a readable checkpoint manifest"]),
    (lambda f: (f / "manifest.json").write_text("[1]"), ["manifest.json", "not a manifest of format 2"]),
    (
        lambda f: (f / "manifest.json").write_text('{"format": 2, "step": 3}'),
        ["manifest.json", "not a complete manifest"],
    ),
    (lambda f: (f / "manifest.json").unlink(), ["neither a checkpoint (no manifest.json) nor a run directory"]),
    (lambda f: (f / "hf" / "config.json").rename(f / "x") and (f / "hf").rmdir(), ["hf is missing"]),
]


@pytest.mark.parametrize(
    ("damage", "words"), DAMAGES, ids=["byte", "file", "json", "list", "cut", "no manifest", "no hf"]
)
def test_a_damaged_checkpoint_is_named_and_leaves_no_output(mrl, checkpoint, tmp_path, damage, words):
    folder, _ = checkpoint
    damage(folder)
    code, _, err = mrl("convert", "megatron-to-hf", str(folder), "-o", str(tmp_path / "out"))
    assert code == 4 and all(word in err for word in words), err
    assert not list(tmp_path.glob("*out*")) and not list(tmp_path.glob(".*"))


def test_nonsense_and_outputs_in_the_way(mrl, checkpoint, tmp_path):
    folder, _ = checkpoint
    code, _, err = mrl("convert", "megatron-to-hf", "nowhere", "-o", "out")
    assert code == 4 and "nowhere: neither a checkpoint" in err
    for output, words in (("model", "is not an empty folder"), ("model/config.json", "is not an empty folder")):
        before = (tmp_path / "model" / "config.json").read_text()
        code, _, err = mrl("convert", "megatron-to-hf", str(folder), "-o", output)
        assert code == 2 and words in err and (tmp_path / "model" / "config.json").read_text() == before
    code, _, err = mrl("convert", "megatron-to-hf", str(folder), "-o", "model/config.json/out")
    assert code == 2 and "cannot be written" in err
