"""What cannot be used has one message and exit code 2, 3 or 4, soon, of every command: a kept corpus of bad inputs."""

import json
import os
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from report_run import World, write_run
from safetensors import SafetensorError, safe_open

from mrl.cli.main import main
from mrl.errors import ConfigError, EnvironmentFault, printable
from mrl.model.hf_files import read_safetensors_header
from mrl.model.registry import known_hf_config, model_spec
from mrl.tools.import_verl.translate import import_script

ROOT = Path(__file__).resolve().parents[2]
PRESET = ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
SCRIPT = ROOT / "tests" / "unit" / "verl_scripts" / "dapo_8b_custom_reward.sh"
SECONDS = 2.0  # of this process, beside what is imported
REFUSED = (2, 3, 4)


def run(*arguments: object) -> int:
    """The exit code of a command; anything but an end of its own is raised."""
    try:
        main([str(each) for each in arguments])
    except SystemExit as end:
        return end.code or 0
    return 0


def refused(capsys, *arguments: object, codes: tuple[int, ...] = REFUSED) -> str:
    """What a command says against its input, which it does soon and in a few lines."""
    began = time.process_time()
    code = run(*arguments)
    spent = time.process_time() - began
    said = capsys.readouterr()
    assert code in codes, f"exit code {code}: {said.out[-500:]}{said.err[-500:]}"
    assert "Traceback" not in said.err and said.out + said.err
    assert spent < SECONDS, f"{spent:.1f} s"
    return said.out + said.err


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory):
    """So that no test pays for what the first one imports."""
    folder = tmp_path_factory.mktemp("first")
    run("validate", PRESET)
    run("plan", PRESET, "--json")
    run("verify", PRESET)
    run("import-verl", "a=1")
    run("init", "Qwen/Qwen3-30B-A3B", "--devices", "8 x h100-80g", "-o", folder / "first.yaml")
    path = write_run(folder / "run", World()).path
    run("report", path)
    run("samples", path)
    run("data", "gsm8k", path / "metrics.jsonl", "-o", folder / "x.parquet")
    run("convert", "megatron-to-hf", path, "-o", folder / "converted")


# ---------------------------------------------------------------- configurations


TEXTS = {
    "deep flow": "a: " + "[" * 3000,
    "deep block": "\n".join(f"{' ' * depth}a:" for depth in range(1500)),
    "digits": "trainer:\n  seed: " + "9" * 5000,
    "400 digits": "trainer:\n  seed: " + "9" * 400,
    "hexadecimal": "trainer:\n  seed: 0x" + "f" * 6000,
    "long list": "a:\n" + "- 1\n" * 200_000,
    "twelve megabytes": "a: [" + "1, " * 4_000_000 + "1]",
    "long scalar": "a: " + "x" * 400_000,
    "bomb": "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(8)
    ),
    "tag": "a: !!python/object/apply:os.system ['touch PWNED']",
    "control": "a: \x01",
    "half a character": 'model: {path: "\\ud800"}',
    "zero byte extends": 'extends: "a\\0b"',
    "endless extends": "extends: /dev/zero",
    "folder extends": "extends: /",
    "itself": "extends: case.yaml",
    "text": "hello",
    "nothing": "",
    "binary": "\x00\x01",
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_a_configuration_that_is_none_is_refused(name, tmp_path, capsys):
    (tmp_path / "case.yaml").write_text(TEXTS[name], encoding="utf-8")
    refused(capsys, "validate", tmp_path / "case.yaml")
    assert not Path("PWNED").exists()


@pytest.mark.parametrize("command", ["validate", "plan", "verify", "train", "submit"])
def test_a_pipe_or_device_is_no_configuration(command, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", "/dev/zero", tmp_path / "absent", tmp_path):
        refused(capsys, command, name)


SETTINGS = [
    f"trainer.seed={'9' * 400}", f"trainer.seed=0x{'f' * 6000}", "trainer.seed=1e30", f"model.path={'x' * 5000}",
    f"trainer.run_dir={'x' * 5000}/{chr(7)}", "rollout.n=1e13",
    "data.train_batch_size=1e9", "data.train_batch_size=1e24", "reward.num_workers=1e9", "reshard.budget_mb=1e20",
    "cluster.nnodes=1e9", "rollout.num_engines=1e9", "actor.layout.world_size=1e9",
    "actor.layout.tensor_model_parallel_size=1e18", "trainer.experiment_name=../../x", "trainer.experiment_name=..",
    "trainer.experiment_name=", 'trainer.experiment_name="a\\0b"', 'trainer.experiment_name="\\e[31mred"',
    'trainer.experiment_name="\\ud800"', 'trainer.run_dir="a\\0b"', 'trainer.run_dir="\\e]0;title\\a"',
    'model.path="a\\0b"', "model.path=/dev/zero", "rollout.engine_kwargs.x=" + "[" * 500, "x" * 10_000 + "=1",
    "actor.optim.lr=.nan", "actor.optim.lr=1e999", "rollout.temperature=-.inf",
]  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda text: re.sub(r"[^ -~]|\\", "", text)[:40])
def test_a_value_that_nothing_can_use_is_refused(setting, capsys):
    refused(capsys, "validate", PRESET, "--set", setting)
    refused(capsys, "plan", PRESET, "--set", setting)


HF_CONFIGS = {
    "hidden_size": ["64", 1e30, -1, 0, True, [64], 10**30], "num_attention_heads": [0, "4", 1e8],
    "num_hidden_layers": [10**9, 10**7, -1, None, {}], "num_experts": [10**8, "8"], "vocab_size": [10**12],
    "rope_theta": ["x", [1], 0], "rms_norm_eps": [{}], "rope_parameters": [[], "x", {"rope_theta": "x"}],
    "mlp_only_layers": [5, [[1]], {"a": 1}], "architectures": [[[]], 5, "Qwen3MoeForCausalLM", [{}]],
    "dtype": [[], 7, {}], "model_type": [[], None, 3], "num_key_value_heads": ["x", 10**9], "head_dim": [10**9, "x"],
    "auto_map": [{"AutoModel": "x.Y"}], "decoder_sparse_step": ["x", 10**9], "hidden_act": [[1]],
}  # fmt: skip


@pytest.mark.parametrize("key", HF_CONFIGS)
def test_a_model_that_nobody_could_build_is_refused(key, tmp_path, capsys):
    whole = known_hf_config("Qwen3-30B-A3B")
    assert model_spec(whole)
    for value in HF_CONFIGS[key]:
        (tmp_path / "config.json").write_text(json.dumps(whole | {key: value}))
        refused(capsys, "validate", PRESET, "--set", f"model.path={tmp_path}")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[]", "null", "{", "", "1" * 5000, '{"a": NaN}'])
def test_a_model_whose_configuration_is_none_is_refused(text, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    for command in ("validate", "plan", "verify"):
        refused(capsys, command, PRESET, "--set", f"model.path={tmp_path}")


# ---------------------------------------------------------------- other commands


COMMANDS = [
    ("doctor", "--port", "99999"), ("doctor", "--port", "0"), ("doctor", "--port", "9" * 5000),
    ("doctor", "--nnodes", "-1"), ("doctor", "--nnodes", "1e30"), ("doctor", "--nnodes", "9" * 4400),
    ("watch", ".", "--port", "9" * 5000), ("init", "Qwen/Qwen3-30B-A3B", "--devices", "1000000000 x h100-80g"),
    ("init", "Qwen/Qwen3-30B-A3B", "--devices", "9" * 5000 + " x h100-80g"),
    ("import-verl", "trainer.nnodes=1e15"), ("import-verl", "trainer.nnodes=" + "9" * 5000),
    ("import-verl", "/dev/zero"), ("plan", PRESET, "--run-dir", PRESET), ("samples", "/dev/zero"),
    ("report", "/dev/zero"), ("compare", "/dev/zero", "/dev/zero"), ("samples", ".", "--step", "9" * 5000),
    ("data", "gsm8k", PRESET, "-o", "x.parquet", "--max-bad-share", "nan"),
    ("data", "gsm8k", PRESET, "-o", "x.parquet", "--max-bad-share", "5"), ("data", "gsm8k", PRESET, "-o", "x.txt"),
    ("convert", "hf-to-megatron", ".", "--layout", "world=100000000", "-o", "out"),
    ("convert", "hf-to-megatron", ".", "--layout", "tp=" + "9" * 5000, "-o", "out"),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(map(str, words))[:60])
def test_an_argument_that_nothing_can_use_is_refused(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(capsys, *command)
    assert not list(tmp_path.iterdir())


def test_a_script_that_is_its_own_only_word_is_refused_at_once():
    """Without its end, the first quote makes the script one word, which is read as a script, and so on."""
    began = time.process_time()
    with pytest.raises(ConfigError, match="nested too deeply"):
        import_script("`" + SCRIPT.read_text(), "script.sh", {})
    assert time.process_time() - began < 0.5


def test_a_runtime_environment_that_is_none_is_refused(tmp_path, capsys):
    file = tmp_path / "env.yaml"
    for text in ("env_vars: {A: " + "9" * 5000 + "}", "- 1", "a: !!python/name:os.system", "[" * 3000, "a: \x01"):
        file.write_text(text)
        refused(capsys, "submit", "--runtime-env", file, PRESET)
    refused(capsys, "submit", "--runtime-env", "/dev/zero", PRESET)


# ---------------------------------------------------------------- run directories


DAMAGE: dict[str, list[object]] = {
    "metrics.jsonl": [
        "[" * 100_000 + "\n", '{"training/global_step": ' + "1" * 5000 + "}\n", '{"training/global_step": "x"}\n',
        '{"training/global_step": null}\n', '{"training/global_step": [1]}\n', '{"training/global_step": 1e999}\n',
        '{"training/global_step": 1, "a": ' + "1" * 400 + "}\n", "null\n", "[]\n",
        '{"training/global_step": 10000000000}\n',
        '{"training/global_step": true}\n', '{"training/global_step": -1}\n',
    ],
    "plan.json": [
        "[" * 100_000, "null", '{"format": 1}', '{"format": 1, "memory": null, "layout": null, "hash": ""}',
        '{"format": [1]}', '{"format": 1, "reshard": {}, "hash": "x"}', "1" * 5000,
    ],
    "config.resolved.yaml": ["", "a: [", "\x00", "model:\n  path: x\n", "x" * 600_000],
}  # fmt: skip


@pytest.fixture
def run_dir(tmp_path) -> Path:
    return write_run(tmp_path / "run", World()).path


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_is_refused_by_all_who_read_it(name, run_dir, tmp_path, capsys):
    for text in DAMAGE[name]:
        (run_dir / name).write_text(str(text))
        refused(capsys, "report", run_dir, "-o", tmp_path / "page.html")
    (run_dir / name).unlink()
    os.mkfifo(run_dir / name)
    refused(capsys, "report", run_dir, "-o", tmp_path / "page.html")


def test_a_plan_with_another_layout_than_its_hash_is_refused(run_dir, tiny_worlds, tmp_path, capsys):
    run("plan", PRESET, "--run-dir", run_dir)
    assert run("report", run_dir) == 0, "as it was written it is read"
    plan = json.loads((run_dir / "plan.json").read_text())
    for change in ({"memory": None}, {"layout": None}, {"times": {}}, {"hash": "0" * 64}):
        (run_dir / "plan.json").write_text(json.dumps(plan | change))
        assert "hash differs" in refused(capsys, "report", run_dir, "-o", tmp_path / "page.html")


LINES = ["[" * 100_000, "null", "{}", "[]", '{"event": "began"}', '{"event": {}, "time": []}', "1" * 5000, "\x00", "{"]


@pytest.mark.parametrize("name", ["attempts.jsonl", "lost_engines.jsonl", "shown_rows.json", "validation/step-6.jsonl"])
def test_a_line_beside_the_metrics_that_is_none_is_passed_over(name, run_dir, tmp_path):
    (run_dir / "validation").mkdir(exist_ok=True)
    (run_dir / name).write_text("".join(f"{line}\n" for line in LINES))
    assert run("report", run_dir, "-o", tmp_path / "page.html") == 0


def _parquet(**columns: object) -> Callable[[Path], None]:
    return lambda path: pq.write_table(pa.table(columns), path)


SAMPLES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-50]),
    "cut at the head": lambda path: path.write_bytes(path.read_bytes()[50:]),
    "foreign": _parquet(a=[1, 2]),
    "texts": _parquet(score=["x"], prompt_id=["y"], group_id=["z"], sample_id=["w"]),
    "one column": _parquet(score=[1.0]),
    "no reward": _parquet(score=[1.0], prompt_id=[1], group_id=[1], sample_id=[1], reward=["{"], reason=["ok"],
                          weight_version=[[{"first_token": 0, "version": 1}]], prompt_ids=[[1]], response_ids=[[1]],
                          rollout_log_probs=[[0.5]], stop_reason=["stop"], seed=[1]),
    "deep reward": _parquet(score=[1.0], prompt_id=[1], group_id=[1], sample_id=[1], reward=["[" * 100_000],
                            reason=["ok"], weight_version=[[{"first_token": 0, "version": 1}]], prompt_ids=[[1]],
                            response_ids=[[-1]], rollout_log_probs=[[0.5]], stop_reason=["stop"], seed=[1]),
    "no versions": _parquet(score=[1.0], prompt_id=[1], group_id=[1], sample_id=[1], reward=["{}"], reason=["ok"],
                            weight_version=pa.array([[]], pa.list_(pa.int32())), prompt_ids=[[1]], response_ids=[[1]],
                            rollout_log_probs=[[0.5]], stop_reason=["stop"], seed=[1]),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_that_are_none_are_refused(name, run_dir, capsys):
    SAMPLES[name](run_dir / "samples" / "step-6.parquet")
    refused(capsys, "samples", run_dir)
    refused(capsys, "samples", run_dir, "--worst", "1")


# ---------------------------------------------------------------- data


ROWS = {
    "deep": '{"question": ' + "[" * 100_000 + "\n",
    "half a character": '{"question": "\\ud800", "answer": "1 #### 2"}\n',
    "a long row": '{"question": "' + "x" * (20 << 20) + '", "answer": "#### 2"}\n',
    "digits": '{"question": ' + "1" * 5000 + "}\n",
    "nothing": "",
    "binary": "\x00\x01\x02",
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_rows_that_are_none_are_refused(name, suffix, tmp_path, capsys):
    (tmp_path / f"rows.{suffix}").write_text(ROWS[name])
    refused(capsys, "data", "gsm8k", tmp_path / f"rows.{suffix}", "-o", tmp_path / "out.parquet", codes=(3,))
    assert not (tmp_path / "out.parquet").exists()


def test_a_bad_row_among_good_ones_costs_itself(tmp_path):
    good = json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n"
    bad = [ROWS["half a character"], ROWS["a long row"], ROWS["deep"]]
    (tmp_path / "rows.jsonl").write_text(good + "".join(bad) + good.replace("1?", "2?"))
    assert run("data", "gsm8k", tmp_path / "rows.jsonl", "-o", tmp_path / "out.parquet", "--max-bad-share", "0.9") == 0
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 2


def test_a_column_of_parquet_whose_name_is_no_text_is_refused(tmp_path, capsys):
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"question": "1 + 1?", "answer": "#### 2"}]), file)
    file.write_bytes(file.read_bytes().replace(b"\x18\x08question%", b"\x18\x08\x80uestion%"))
    refused(capsys, "data", "gsm8k", file, "-o", tmp_path / "out.parquet", codes=(3,))


def test_a_huge_row_of_parquet_costs_itself(tmp_path):
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(3)]
    rows[1]["question"] = "x" * (20 << 20)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    out = tmp_path / "out.parquet"
    assert run("data", "gsm8k", tmp_path / "rows.parquet", "-o", out, "--max-bad-share", "0.5") == 0
    assert pq.read_table(out).num_rows == 2


# ---------------------------------------------------------------- safetensors


def safetensors(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(start: int, stop: int, shape: object = None, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": [(stop - start) // 4] if shape is None else shape, "data_offsets": [start, stop]}


HEADERS: dict[str, bytes] = {
    "overlap": safetensors({"a": tensor(0, 16), "b": tensor(8, 24)}, bytes(24)),
    "same bytes": safetensors({"a": tensor(0, 16), "b": tensor(0, 16)}, bytes(16)),
    "in the header": safetensors({"a": tensor(-8, 8)}, bytes(16)),
    "backwards": safetensors({"a": tensor(16, 0, [4])}, bytes(16)),
    "more than its shape": safetensors({"a": tensor(0, 16, [2])}, bytes(16)),
    "less than its shape": safetensors({"a": tensor(0, 16, [2**62, 4])}, bytes(16)),
    "negative shape": safetensors({"a": tensor(0, 16, [-4])}, bytes(16)),
    "floats": safetensors({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0.0, 16.0]}}, bytes(16)),
    "dtype is a list": safetensors({"a": tensor(0, 16, dtype=["F32"])}, bytes(16)),
    "shape is a text": safetensors({"a": tensor(0, 16, "4")}, bytes(16)),
    "no offsets": safetensors({"a": {"dtype": "F32", "shape": [4]}}, bytes(16)),
    "three offsets": safetensors({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8, 16]}}, bytes(16)),
    "a list": safetensors([1, 2]),
    "null": safetensors({"a": None}),
    "deep": safetensors(b"[" * 100_000),
    "cut short": safetensors({"a": tensor(0, 1600)}, bytes(16)),
    "more behind": safetensors({"a": tensor(0, 16)}, bytes(20)),
    "a gap": safetensors({"a": tensor(0, 16), "b": tensor(32, 48)}, bytes(48)),
    "a gap at the beginning": safetensors({"a": tensor(16, 32)}, bytes(32)),
    "huge": safetensors({"a": tensor(0, 16)}, bytes(16), 2**63),
    "long length": safetensors({}, length=1000),
    "no bytes": b"",
    "digits": safetensors(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, ' + b"9" * 5000 + b"]}}"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_a_file_of_tensors_that_is_none_is_refused(name, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(HEADERS[name])
    with pytest.raises(EnvironmentFault):
        read_safetensors_header(file)
    with pytest.raises(SafetensorError), safe_open(file, "numpy"):
        pass  # nothing is refused here that the library takes


def test_what_the_library_writes_is_read(tmp_path):
    from safetensors.numpy import save_file

    file = tmp_path / "model.safetensors"
    save_file({}, file)
    assert read_safetensors_header(file) == {}
    tensors = {"a": np.zeros((2, 3), np.float32), "none": np.zeros((0, 3), np.float16), "b": np.ones(5, np.int8)}
    save_file(tensors, file)
    assert {name: found.shape for name, found in read_safetensors_header(file).items()} == {
        name: array.shape for name, array in tensors.items()
    }


# ---------------------------------------------------------------- terminals


def test_what_a_terminal_obeys_is_shown_as_text(capsys, run_dir, tmp_path):
    assert printable("a\x1b[31m\x07\u202e\ud800\tä\n😀") == "a\\x1b[31m\\x07\\u202e\\ud800\tä\n😀"
    escape = "\x1b]0;owned\x07"
    row = {"event": "began", "time": "t", "command": ["mrl"], "versions": {}, "host": "h", "pid": 1, "step": 0}
    end = {"event": "ended", "time": "t", "exit_code": 1, "message": f"lost {escape}"}
    (run_dir / "attempts.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(end)}\n")
    said = []
    for command in (
        ("validate", PRESET, "--set", f'"{escape}"=1'),
        ("validate", PRESET, "--set", f"model.path={escape}"),
        ("init", escape, "--devices", "8 x h100-80g", "-o", tmp_path / "first.yaml"),
        ("report", run_dir),
        (escape,),
    ):
        run(*command)
        streams = capsys.readouterr()
        said.append(streams.out + streams.err)
    assert all("\x1b" not in text and "\x07" not in text for text in said)
    assert sum("\\x1b]0;owned" in text for text in said) >= 3
    assert "\x1b" not in (run_dir / "report.html").read_text()
