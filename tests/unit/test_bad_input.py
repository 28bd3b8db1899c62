"""What is wrong ends `mrl train` with one message, its exit code, and nothing left behind. Nothing here reaches Ray."""

import json
import re
import shutil
import socket
import threading
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from replicas import scorers, stored
from small_model import write_model

from mrl.checkpoint.manifest import Manifest, RankFiles, file_facts, sealed, write_manifest
from mrl.cli.main import main
from mrl.cluster.prerequisites import check_reachable
from mrl.config.load import load_config
from mrl.config.schedule_rules import schedule_of
from mrl.config.schema import RewardConfig
from mrl.data.samples import Sample
from mrl.errors import DataError, EnvironmentFault
from mrl.record.run_dir import RunDir
from mrl.record.sinks import JsonlSink
from mrl.reward.items import Question, RewardSpec
from mrl.reward.pool import RewardPool
from mrl.schedule.buffer import GroupBuffer
from mrl.schedule.ledger import snapshot

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
REACHED = "everything before the cluster was right"


def row(prompt="1+1=", **changes):
    return {"data_source": "sum", "prompt": prompt, "reward_model": {"ground_truth": "2"}} | changes


def write_rows(path: Path, rows: list) -> None:
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model folder and data that `mrl train` has nothing against."""
    folder = tmp_path_factory.mktemp("world")
    write_model(folder / "model")
    write_rows(folder / "train.jsonl", [row(f"{i}+1=") for i in range(64)])
    config = {
        "extends": str(TINY),
        "model": {"path": "model"},
        "actor": {"ppo_mini_batch_size": 16, "optim": {"lr_warmup_steps": 0}},
        "data": {"train_files": "train.jsonl", "val_files": [], "train_batch_size": 32, "max_prompt_length": 16},
        "trainer": {"test_freq": -1},
        "cluster": {"cpus_per_actor": 0.01, "cpus_per_engine": 0.01},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture
def world(made, tmp_path, monkeypatch):
    """A copy to spoil, as the working directory, with no cluster behind it."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


@pytest.fixture
def train(world, monkeypatch, capfd):
    """Runs `mrl train run.yaml`; its exit code and what it said.

    Where all is right, the place of the cluster ends it with code 4.
    """

    def train(*arguments: str, config="run.yaml") -> tuple[int, str]:
        from mrl.driver import assemble_files

        @contextmanager
        def no_cluster(_):
            raise EnvironmentFault(REACHED)
            yield

        monkeypatch.setattr(assemble_files, "ray_cluster", no_cluster)
        with pytest.raises(SystemExit) as ended:
            main(["train", config, *arguments])
        assert not children(), "processes are left over"
        out = capfd.readouterr()
        assert "Traceback" not in out.err
        return ended.value.code, out.out + out.err

    return train


def children() -> list[str]:
    """Processes below this one, without multiprocessing's own, which stays once a test has begun it."""
    found = [pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]
    return [pid for pid in found if pid != str(resource_tracker._resource_tracker._pid)]


@pytest.fixture
def refused(train, world):
    """`mrl train` with these arguments ends with this code and these words, and makes no run directory."""

    def refused(code: int, words: list[str], *arguments: str, config="run.yaml") -> None:
        before = sorted(world.rglob("*"))
        found, said = train(*arguments, config=config)
        assert found == code, said
        assert not [word for word in words if word not in said], said
        left = [p for p in set(world.rglob("*")) - set(before) if "__pycache__" not in p.parts]
        assert not left

    return refused


def test_a_world_without_faults_reaches_the_cluster_and_says_what_it_will_do(refused):
    refused(4, [REACHED, "loss: gspo, seq-mean-token-mean, clip", "layout: actor 2 x cpu (TP 2, EP 2)", "64 kept"])


SETTINGS = [
    ("actor.optim.lrr=1", 2, ["actor.optim.lrr (--set): unknown key; did you mean lr?"]),
    ("actor.lr=1", 2, ["did you mean actor.optim.lr?"]),
    ("actor.optim.lr=3e-4", 4, [REACHED]),
    ("actor.optim.lr=fast", 2, ["actor.optim.lr = fast (--set): must be a number > 0"]),
    ("actor.layout.tensor_model_parallel_size=3", 2, ["actor.layout", "= 3", "allowed: "]),
    ("actor.layout.world_size=3", 2, ["actor.layout.world_size", "= 3"]),
    (
        "actor.ppo_mini_batch_size=5",
        2,
        ["actor.ppo_mini_batch_size = 5", "must divide data.train_batch_size = 32", "allowed: 1, 2, 4, 8"],
    ),
    ("cluster.placement=colocated", 4, [REACHED]),
    ("model.path=elsewhere", 4, ["elsewhere/config.json does not exist (no such directory"]),
    (
        "data.train_files=none.jsonl",
        2,
        ["data.train_files", "none.jsonl is not a file that can be read", "current directory"],
    ),
    ("data.train_batch_size=128", 3, ["data.train_batch_size is 128 prompts and the data has 64"]),
    ("cluster.cpus_per_actor=1000", 4, ["CPU: the run needs 2000.01", "the cluster has", "choose a smaller layout"]),
    ("reward.function=exactmatch", 2, ["did you mean exact_match?"]),
    (
        "reward.custom_reward_function.path=none.py",
        2,
        ["reward.custom_reward_function.path = none.py", "is not a file that can be read"],
    ),
    ("trainer.run_dir=run.yaml/x", 2, ["trainer.run_dir = run.yaml/x", "is a file"]),
]


@pytest.mark.parametrize(("setting", "code", "words"), SETTINGS, ids=[s[0] for s in SETTINGS])
def test_a_setting_that_cannot_be(setting, code, words, refused):
    refused(code, words, "--set", setting)


FILES = [
    (None, "bad.yaml: cannot be read: No such file"),
    ("# nothing\n", "bad.yaml: is empty"),
    ("model:\n\tpath: x\n", "bad.yaml:2: not valid YAML"),
    ("- a\n", "must be a mapping of sections"),
    ("model: {path: !!python/object:os.system x}\n", "only plain data is read"),
]


@pytest.mark.parametrize(("text", "words"), FILES, ids=["absent", "empty", "tabs", "list", "tag"])
def test_a_configuration_file_that_cannot_be_used(text, words, refused):
    if text is not None:
        Path("bad.yaml").write_text(text)
    refused(2, [words], config="bad.yaml")


# --- the model --------------------------------------------------------------------------------------------------------


def change_config(**changes):
    file = Path("model/config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def cut_short():
    file = Path("model/model.safetensors")
    file.write_bytes(file.read_bytes()[:-1])


MODELS = [
    (lambda: Path("model/model.safetensors").unlink(), 4, ["model.path model: no safetensors files there"]),
    (cut_short, 4, ["model.safetensors cannot be read", "cut short", "download the checkpoint again"]),
    (
        lambda: shutil.copy("model/model.safetensors", "model/model-2.safetensors"),
        4,
        ["model.safetensors: lm_head.weight is stored in another file", "remove one of both"],
    ),
    (
        lambda: change_config(num_experts=2),
        4,
        ["the weights are not those of the qwen3_moe model", "experts.2.", "not part of the model"],
    ),
    (lambda: change_config(vocab_size=256), 4, ["embed_tokens.weight has shape [128, 64], not [256, 64]"]),
    (
        lambda: change_config(architectures=["GraniteForCausalLM"]),
        2,
        ["['GraniteForCausalLM'] is not supported", "nearest supported family is qwen3_moe", "docs/adding_a_family.md"],
    ),
    (lambda: change_config(auto_map={"AutoModel": "x.py"}), 2, ["auto_map", "trust_remote_code", "never"]),
    (lambda: Path("model/config.json").write_text("{"), 4, ["config.json cannot be read as JSON"]),
    (lambda: Path("model/tokenizer.json").write_text("{"), 4, ["the tokenizer in model cannot be read"]),
    (lambda: Path("model/chat_template.jinja").unlink(), 2, ["no chat template", "chat_template.jinja"]),
]
MODEL_IDS = [
    "no weights",
    "cut short",
    "stored twice",
    "fewer experts",
    "vocabulary",
    "architecture",
    "remote code",
    "not json",
    "tokenizer",
    "template",
]


@pytest.mark.parametrize(("spoil", "code", "words"), MODELS, ids=MODEL_IDS)
def test_a_model_that_cannot_be_trained_is_told_before_anything_starts(spoil, code, words, refused):
    spoil()
    refused(code, words)


# --- the data ---------------------------------------------------------------------------------------------------------

DATA = [
    ([], ["no prompt is left to train on", "0 rows read"]),
    ([row(), "not json\n"], ["more bad rows", "train.jsonl, row 2: not JSON"]),
    ([{"question": "1+1"}] * 3, ["train.jsonl, row 1: no column prompt, data_source, reward_model; found: question"]),
    ([row(prompt=3)] * 3, ["row 1: prompt is int '3', expected a string or a list of {role, content} (and 2 more"]),
    (
        [row(prompt=[{"role": "robot", "content": "1+1="}])] * 3,
        ["row 1: prompt has a message of the role 'robot': roles are system, developer, user, assistant, tool"],
    ),
    (
        [json.dumps(row()).replace("{", '{"prompt": "2+2=", ', 1) + "\n"] * 3,
        ["train.jsonl, row 1: the key 'prompt' is there twice in one object"],
    ),
    ([row(reward_model={})] * 3, ["row 1: reward_model.ground_truth is missing"]),
]


@pytest.mark.parametrize(
    ("rows", "words"), DATA, ids=["empty", "not json", "columns", "prompt", "role", "twice", "no truth"]
)
def test_data_that_cannot_be_used_names_its_rows(rows, words, refused):
    write_rows(Path("train.jsonl"), rows)
    refused(3, words)


def test_a_parquet_file_of_another_schema_or_none_at_all(refused):
    pq.write_table(pa.table({"question": ["1+1="]}), "other.parquet")
    refused(3, ["other.parquet: no column prompt", "found: question"], "--set", "data.train_files=other.parquet")
    Path("torn.parquet").write_bytes(Path("other.parquet").read_bytes()[:-9])
    refused(3, ["torn.parquet: not readable as parquet"], "--set", "data.train_files=torn.parquet")
    refused(3, ["unknown kind of data file '.yaml'", ".parquet, .jsonl"], "--set", "data.train_files=run.yaml")


def test_a_few_bad_rows_are_set_aside_and_counted(refused):
    write_rows(Path("train.jsonl"), [*(row(f"{i}+1=") for i in range(199)), "not json\n"])
    refused(4, ["200 rows read: 199 kept (0 truncated), 1 bad", "train.jsonl, row 200: not JSON", REACHED])


LONG = [
    ([], 4, ["64 kept (0 truncated), 0 bad, 1 over length", REACHED]),
    (["data.filter_overlong_prompts=false", "data.truncation=left"], 4, ["65 kept (1 truncated)", REACHED]),
    (
        ["data.filter_overlong_prompts=false"],
        3,
        ["1 prompts are over data.max_prompt_length (16 tokens)", "row 65: 31 tokens"],
    ),
]


@pytest.mark.parametrize(("settings", "code", "words"), LONG, ids=["filter", "truncate", "stop"])
def test_a_prompt_over_length_is_filtered_cut_or_ends_the_run_as_configured(settings, code, words, refused, world):
    with (world / "train.jsonl").open("a") as file:
        file.write(json.dumps(row("9" * 30)) + "\n")  # the template adds one token
    refused(code, words, *[part for s in settings for part in ("--set", s)])


# --- the reward's own file --------------------------------------------------------------------------------------------

REWARDS = [
    ("def other(): pass\n", ["no function 'compute_score'; the file defines: other"]),
    ("import nowhere\n", ["importing it failed: ModuleNotFoundError", "nowhere"]),
    ("raise SystemExit(0)\n", ["importing it failed: SystemExit"]),
    ("import os; os._exit(3)\n", ["could not be loaded", "exit status 3"]),
]


@pytest.mark.parametrize(("text", "words"), REWARDS, ids=["no function", "import", "exit", "dies"])
def test_a_reward_file_that_cannot_be_loaded(text, words, refused):
    Path("mine.py").write_text(text)
    refused(2, words, "--set", "reward.custom_reward_function.path=mine.py")


# --- the run directory and --resume -----------------------------------------------------------------------------------


def made_run(world, steps=(), checkpoint=None, **changes) -> Path:
    """A run directory with metrics lines of `steps` and a checkpoint of the step `checkpoint`."""
    run = RunDir.open(world / "runs" / "old", "a: 1\n")
    sink = JsonlSink(run.metrics)
    for step in steps:
        sink.write(step, {})
    sink.close()
    if checkpoint is not None:
        make_checkpoint(run.checkpoints / f"step-{checkpoint}", checkpoint, changes)
    run.close()
    return run.path


def make_checkpoint(folder: Path, step: int, changes: dict) -> None:
    """A checkpoint of one rank with one file; `changes` of its manifest."""
    folder.mkdir()
    (folder / "rank-00000.safetensors").write_bytes(b"12345678")
    rank = RankFiles(
        (), {"rank-00000.safetensors": file_facts(folder / "rank-00000.safetensors")}, {"num_updates": step}
    )
    facts = {
        "layout": {},
        "dtype": "float32",
        "hf_config": json.loads(Path("model/config.json").read_text()),
        "ranks": (rank,),
        "trainer": trainer_state(),
        "versions": {},
    }
    write_manifest(folder, Manifest(step=step, **facts | changes))


def trainer_state() -> dict:
    """What the checkpoint says of the trainer."""
    from mrl.data.dataset import PromptDataset, PromptParameters, load_tokenizer

    prompts = PromptDataset.load(["train.jsonl"], load_tokenizer("model"), PromptParameters(max_prompt_length=16))
    fixed = {
        "trainer.seed": 0,
        "data.shuffle": True,
        "data.train_batch_size": 32,
        "data.train_weights": [],
        "rollout.n": 8,
        "data.gen_batch_size": None,
    }
    return {
        "cursor": {"epoch": 0, "index": 32},
        "data_fingerprint": prompts.fingerprint,
        "metrics": {},
        "fixed": fixed,
    }


OLD = ("--run-dir", "runs/old")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def refused_resume(refused):
    """As `refused`, with --resume, and the run that is there keeps every byte."""

    def refused_resume(code, words, run, *arguments):
        before = contents(run)
        refused(code, words, *OLD, "--resume", *arguments)
        assert contents(run) == before

    return refused_resume


def test_a_directory_of_another_run_is_refused_untouched(refused, world):
    run = made_run(world, steps=[0, 1])
    before = contents(run)
    refused(2, ["runs/old holds another run", "--resume", "--run-dir"], *OLD)
    assert contents(run) == before


def test_a_run_that_failed_before_its_first_step_is_no_obstacle_to_the_next(refused, world):
    run = made_run(world, steps=[0])  # the validation of the untrained model
    refused(4, [REACHED], *OLD)
    RunDir.open(run, "a: 2\n").close()
    assert (run / "metrics.jsonl").read_text() == ""


def test_resuming_what_is_no_run(refused):
    refused(2, ["runs/old holds no run", "leave --resume out"], *OLD, "--resume")


AUTO = ("--set", "trainer.resume_mode=auto")


def test_resume_mode_auto_begins_a_run_where_there_is_none_and_goes_on_where_there_is_one(refused, train, world):
    refused(4, ["runs/old holds no run; a new one begins", REACHED], *OLD, *AUTO)
    run = made_run(world, [0, 1, 2], checkpoint=2)
    before = contents(run)
    refused(4, ["runs/old holds a run, which goes on", REACHED], *OLD, *AUTO)
    refused(2, ["step-2 was trained with 0"], *OLD, *AUTO, "--set", "trainer.seed=7")  # nothing is begun over it
    assert contents(run) == before
    shutil.rmtree(run)
    refused_at_once = ["runs/old holds no run", "leave --resume out"]
    refused(2, refused_at_once, *OLD, *AUTO, "--resume")


def test_resume_mode_auto_leaves_a_finished_run_and_does_not_start_over_damage(refused, world):
    run = made_run(world, [0, 1, 2, 3], checkpoint=3)
    refused(0, ["has 3 steps already"], *OLD, *AUTO, "--set", "trainer.total_training_steps=3")
    (run / "checkpoints" / "step-3" / "rank-00000.safetensors").write_bytes(b"123")
    refused(4, ["damaged"], *OLD, *AUTO)


def by_path(folder) -> tuple[str, ...]:
    return ("--set", "trainer.resume_mode=resume_path", "--set", f"trainer.resume_from_path={folder}")


def test_resume_path_begins_a_run_of_its_own_from_a_checkpoint(refused, world):
    run = made_run(world, [0, 1, 2], checkpoint=2)
    (run / "checkpoints" / "step-2" / "hf").mkdir()
    shutil.copy("model/config.json", run / "checkpoints" / "step-2" / "hf")
    before = contents(run)
    for folder in (run, run / "checkpoints" / "step-2"):
        refused(4, ["a new run in runs/new begins from", REACHED], "--run-dir", "runs/new", *by_path(folder))
    refused(2, ["runs/old holds another run"], *OLD, *by_path(run))
    refused(2, ["rollout.n: 16, and", "step-2 was trained with 8"], *by_path(run), "--set", "rollout.n=16")
    refused(2, ["trainer.resume_from_path = nowhere", "is no folder"], *by_path("nowhere"))
    refused(4, ["model: neither a checkpoint"], *by_path("model"))
    assert contents(run) == before


def test_a_run_that_only_validates_does_not_go_on_from_a_checkpoint(refused_resume, world):
    run = made_run(world, [0, 1, 2], checkpoint=2)
    only = ("--set", "trainer.val_only=true", "--set", "data.val_files=train.jsonl")
    refused_resume(2, ["trainer.val_only", "mrl eval", "step-2"], run, *only)


def test_a_run_that_begins_from_a_checkpoint_has_its_step_and_its_place_in_the_data(world):
    from mrl.driver.resume import RunIdentity, find_resume_point, resumed_state

    old = made_run(world, [0, 1, 2], checkpoint=2)
    (old / "checkpoints" / "step-2" / "hf").mkdir()
    shutil.copy("model/config.json", old / "checkpoints" / "step-2" / "hf")
    config = load_config("run.yaml", overrides=by_path(old)[1::2]).config
    new = RunDir.open(world / "runs" / "new", "")
    point = find_resume_point(config.trainer, RunIdentity.of(config), new.path, resume=False)
    state = resumed_state(point, config.algorithm.kl_ctrl)
    assert (point.path, state.step, state.cursor.index) == ((old / "checkpoints" / "step-2").resolve(), 2, 32)
    plain = load_config("run.yaml").config
    assert find_resume_point(plain.trainer, RunIdentity.of(plain), new.path, resume=False) is None
    new.close()


def test_resuming_with_what_fits_reaches_the_cluster(refused_resume, world):
    refused_resume(4, [REACHED], made_run(world, [0, 1, 2], checkpoint=2))
    shutil.rmtree(world / "runs")
    refused_resume(4, [REACHED], made_run(world, [0, 1]))  # killed before it saved


def test_resuming_with_other_data_model_or_dtype(refused_resume, world):
    run = made_run(world, [0, 1, 2], checkpoint=2)
    refused_resume(2, ["model.dtype: bfloat16", "float32"], run, "--set", "model.dtype=bfloat16")
    write_rows(Path("other.jsonl"), [row(f"{i}+2=") for i in range(64)])
    refused_resume(
        3, ["was trained on other prompts than data.train_files"], run, "--set", "data.train_files=other.jsonl"
    )
    change_config(rope_theta=5e5)
    refused_resume(2, ["model.path: model is another model"], run)


@pytest.mark.parametrize(
    ("key", "value", "old"), [("trainer.seed", "7", "0"), ("data.shuffle", "false", "True"), ("rollout.n", "16", "8")]
)
def test_resuming_with_another_order_of_samples(refused_resume, world, key, value, old):
    run = made_run(world, [0, 1, 2], checkpoint=2)
    refused_resume(2, [f"{key}: {value.title()}, and", "step-2 was trained with", old], run, "--set", f"{key}={value}")


AHEAD = ("--set", "trainer.schedule=bounded", "--set", "trainer.max_staleness=1")


def made_run_ahead(world) -> Path:
    """The same with generation ahead of training, one group of it finished."""
    from mrl.driver.resume import RunIdentity

    config = load_config("run.yaml", overrides=AHEAD[1::2]).config
    buffer = GroupBuffer(schedule_of(config))
    old = made_run(world, [0, 1], checkpoint=1)
    trainer = json.loads((old / "checkpoints" / "step-1" / "manifest.json").read_text())["trainer"]
    ledger = snapshot(buffer).to_json()
    trainer |= {"fixed": RunIdentity.of(config).fixed, "ahead": {"ledger": ledger, "files": {}}}
    shutil.rmtree(world / "runs")
    return made_run(world, [0, 1, 2], checkpoint=2, trainer=trainer)


CHANGED_AHEAD = [
    ("trainer.max_staleness", "2", "1"),
    ("trainer.order", "ready_first", "in_order"),
    ("algorithm.filter_groups.enable", "true", "False"),
    ("trainer.schedule", "one_step_off", "bounded"),
    ("trainer.schedule", "sync", "bounded"),
    ("data.max_response_length", "3", "4"),
]


@pytest.mark.parametrize(("key", "value", "old"), CHANGED_AHEAD)
def test_resuming_generation_ahead_by_other_rules(refused_resume, world, key, value, old):
    """Before a process is started, and before a byte of the run is another."""
    run = made_run_ahead(world)
    refused_resume(4, [REACHED], run, *AHEAD)
    more = ("--set", "trainer.max_staleness=0") if key == "trainer.schedule" else ()
    words = [f"{key}: ", "step-2 was trained with", old]
    refused_resume(2, words, run, *AHEAD, *more, "--set", f"{key}={value}")


def test_resuming_generation_ahead_whose_groups_were_issued_by_other_rules_or_are_missing(refused_resume, world):
    """As a checkpoint says it whose fixed values are not those of its ledger, or which has no groups at all."""
    run = made_run_ahead(world)
    manifest = run / "checkpoints" / "step-2" / "manifest.json"
    said = json.loads(manifest.read_text())
    said["trainer"]["ahead"]["ledger"]["schedule"]["segment_tokens"] = 9
    manifest.write_text(json.dumps(sealed(said)))
    refused_resume(3, ["unfinished were made with other values of segment_tokens (9 then"], run, *AHEAD)
    del said["trainer"]["ahead"]
    manifest.write_text(json.dumps(sealed(said)))
    refused_resume(2, ["step-2 has no groups on their way", "mrl convert megatron-to-hf"], run, *AHEAD)


def test_a_finished_run_is_left_as_it_is(refused_resume, world):
    run = made_run(world, [0, 1, 2, 3], checkpoint=3)
    for total in (3, 2):
        words = ["has 3 steps already", f"of the {total} of trainer.total_training_steps", "raise it to train on"]
        refused_resume(0, words, run, "--set", f"trainer.total_training_steps={total}")


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(refused_resume, world):
    run = made_run(world, [0, 1, 2], checkpoint=2)
    (run / "checkpoints" / "step-2" / "rank-00000.safetensors").write_bytes(b"123")
    refused_resume(4, ["rank-00000.safetensors has 3 bytes, not 8", "damaged"], run)


# --- the cluster ------------------------------------------------------------------------------------------------------


@contextmanager
def listener(answer: bytes | None = None):
    """A port of this machine where something listens, and sends `answer` to who connects."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        if answer is not None:
            threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def test_a_port_in_use(refused):
    with listener() as port:
        refused(4, [f"cluster.port {port} is in use", "leave it out for a free one"], "--set", f"cluster.port={port}")
    refused(4, [REACHED], "--set", f"cluster.port={port}")


ADDRESSES = ["127.0.0.1:1", "http://127.0.0.1:8265", "nonsense", "127.0.0.1:99999"]


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_where_no_ray_head_is(address, refused, monkeypatch):
    words = [f"no Ray head answers at {address} (from cluster.address or $RAY_ADDRESS)", "launch/start_head.sh"]
    refused(4, words, "--set", f"cluster.address={address}")
    monkeypatch.setenv("RAY_ADDRESS", address)
    refused(4, words)


def test_something_that_listens_and_is_no_ray_head():
    with listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        with pytest.raises(EnvironmentFault, match="something else listens there; the dashboard's port"):
            check_reachable(f"127.0.0.1:{port}", 5.0)
    with listener() as port:
        with pytest.raises(EnvironmentFault, match="timed out"):
            check_reachable(f"127.0.0.1:{port}", 0.2)
    # a SETTINGS frame, with which every HTTP/2 server begins
    with listener(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])) as port:
        check_reachable(f"127.0.0.1:{port}", 5.0)


# --- rewards that fail while the run goes on --------------------------------------------------------------------------

FAILING = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    match solution_str:
        case "raise":
            raise ValueError("no answer in it")
        case "hang":
            time.sleep(60)
        case "nan":
            return float("nan")
        case "die":
            os._exit(9)
    return 1.0
"""


def collected(pool: RewardPool, reward: RewardConfig, answers: list[tuple[str, str]], order=None) -> list:
    """The results of responses, each a data source and a text, as the loop collects them; in the order of `order`."""
    from mrl.generate.rollouts import Responder

    made = [
        Sample(0, 0, n, 0, (1,), tuple(map(ord, text)), (0.0,) * len(text), "stop", 0)
        for n, (_, text) in enumerate(answers)
    ]
    group = scorers(pool, SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(map(chr, ids))))
    group.submit(stored(made), [Question(n, source, "2") for n, (source, _) in enumerate(answers)], "engine 0")
    responder = Responder(None, group, reward, display=None, poll=lambda: None)
    return responder.collect_rewards(stored([made[n] for n in order or range(len(made))]))


@pytest.fixture
def scored(tmp_path):
    """The rewards of one step's responses as the loop collects them,
    failures scored -1 and allowed up to a share of one half.
    """

    def scored(texts: list[str]) -> list:

        (tmp_path / "mine.py").write_text(FAILING)
        with RewardPool(RewardSpec(path=str(tmp_path / "mine.py")), 1, timeout_s=0.5, failure_score=-1.0) as pool:
            reward = RewardConfig(max_failure_share=0.5, failure_score=-1.0)
            return collected(pool, reward, [("sum", text) for text in texts])

    return scored


REASONS = {"raise": "raised", "hang": "timeout", "nan": "not_a_number", "die": "died"}


def test_failing_rewards_get_the_failure_score_and_the_run_goes_on(scored):
    results = scored([*REASONS, "right", "right", "right", "right"])
    assert [r.reason for r in results] == [*REASONS.values(), "ok", "ok", "ok", "ok"]
    assert [r.score for r in results] == [-1.0] * 4 + [1.0] * 4


def test_without_a_failure_score_a_failure_counts_as_the_lowest_of_its_batch(tmp_path):
    """Scores -1, the wrong answer, and 1; the one that hangs must not stand between them."""

    (tmp_path / "mine.py").write_text(
        FAILING.replace("return 1.0", "return 1.0 if solution_str == ground_truth else -1.0")
    )
    reward = RewardConfig(max_failure_share=0.5)
    with RewardPool(RewardSpec(path=str(tmp_path / "mine.py")), 1, timeout_s=0.5) as pool:
        results = collected(pool, reward, [("sum", text) for text in ("hang", "2", "3")], order=(2, 0, 1))
    assert [(r.score, r.reason) for r in results] == [(-1.0, "ok"), (-1.0, "timeout"), (1.0, "ok")]


def test_in_training_a_failure_counts_as_the_lowest_of_its_own_data_source(tmp_path):
    """Under a rule of 0 and 1, the -100 of another source would be all that its group learns from."""

    scores = "return (-100.0 if data_source == 'steep' else 0.0) if solution_str == 'wrong' else 1.0"
    (tmp_path / "mine.py").write_text(FAILING.replace("return 1.0", scores))
    answers = [
        ("flat", "raise"),
        ("flat", "wrong"),
        ("flat", "right"),
        ("steep", "wrong"),
        ("steep", "raise"),
        ("mute", "raise"),
    ]
    reward = RewardConfig(max_failure_share=0.5)
    with RewardPool(RewardSpec(path=str(tmp_path / "mine.py")), 1, timeout_s=5.0) as pool:
        results = collected(pool, reward, answers)
    # mute has no score of its own: the batch's lowest
    assert [r.score for r in results] == [0.0, 0.0, 1.0, -100.0, -100.0, -100.0]


def test_more_failing_rewards_than_allowed_end_the_run_with_the_reasons(scored):
    with pytest.raises(DataError) as error:
        scored([*REASONS, "right"])
    assert error.value.exit_code == 3
    said = str(error.value)
    # three failures of five are enough to stop waiting for the others
    assert re.search(r"failed on [34] of [345] responses, more than reward.max_failure_share \(0.5\) allows", said)
    assert "1 raised: ValueError: no answer in it" in said
    assert sum(f"1 {reason}: " in said for reason in REASONS.values()) >= 3
    assert not children()
