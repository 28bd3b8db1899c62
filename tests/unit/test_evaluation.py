"""`mrl eval` of a checkpoint: configuration, data and reward are looked at before the checkpoint is converted or
anything starts.
"""

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from generations import AnsweringEngines
from replicas import scorers
from safetensors.numpy import save_file
from small_model import SEEING_WHOLE, write_model
from test_data import row, write_jsonl

import mrl.driver.assemble as assemble
import mrl.driver.assemble_files as assemble_files
import mrl.driver.evaluation as evaluation
import mrl.driver.preflight as preflight
from mrl.checkpoint.convert import write_layout
from mrl.checkpoint.manifest import read_manifest, write_manifest
from mrl.checkpoint.open_checkpoint import open_hf, open_mrl
from mrl.checkpoint.vision_tower import TOWER, check_same_tower, open_whole
from mrl.cli.main import main
from mrl.cluster.rollout_group import EngineOrder
from mrl.config.load import load_config
from mrl.config.schema import with_values
from mrl.data.dataset import load_tokenizer
from mrl.data.samples import ImageStore, Sample
from mrl.driver.assemble import open_run
from mrl.driver.preflight import RunInputs, _model_of
from mrl.driver.resume import RunIdentity
from mrl.engine.engine_state import TEXT_FOLDER
from mrl.errors import ConfigError, EnvironmentFault
from mrl.model import load_model_spec, model_spec
from mrl.model.peft_files import tower_digest
from mrl.model.tensors import stored_shapes
from mrl.plan.run_plan import plan_again
from mrl.reward.pool import RewardPool

TINY = Path(__file__).resolve().parents[2] / "parallel_configs" / "tiny-moe" / "cpu.yaml"


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A run with one saved step, and a held-out file."""
    folder = tmp_path_factory.mktemp("world")
    write_model(folder / "model")
    (folder / "run" / "checkpoints").mkdir(parents=True)
    write_layout(open_hf(folder / "model"), folder / "run" / "checkpoints" / "step-7", {"world_size": 1})
    write_jsonl(folder / "val.jsonl", [row("1+1", "2", source="exact_match")])
    return folder


@pytest.fixture
def refused(world, tmp_path, monkeypatch, capsys):
    """The exit code and message of an evaluation that must not have converted or started anything."""

    def nothing_may_start(*_, **__):
        raise AssertionError("too late: something was converted or started")

    for name in ("write_hf", "ray_cluster", "RolloutGroup"):
        monkeypatch.setattr(evaluation, name, nothing_may_start)
    monkeypatch.chdir(tmp_path)

    def refused(*arguments: str) -> tuple[int, str]:
        files = ["--set", f"data.val_files={world}/val.jsonl", "--set", "model.path=nowhere"]
        with pytest.raises(SystemExit) as ended:
            main(["eval", str(TINY), *files, "--checkpoint", str(world / "run"), "-o", "out", *arguments])
        return ended.value.code, capsys.readouterr().err

    return refused


def test_all_that_the_configuration_breaks_is_told_at_once(refused, tmp_path):
    code, said = refused("--set", "rollout.top_k=0", "--set", "data.max_response_length=4096")
    assert code == 2 and "rollout.top_k" in said and "data.max_response_length" in said
    assert not (tmp_path / "out").exists()


def test_the_model_is_the_checkpoints_and_not_that_of_the_configuration(refused):
    """Which is not there; the checkpoint's has 128 positions, for prompts of 16 tokens and so at most 112 more."""
    code, said = refused("--set", "data.max_response_length=113")
    assert code == 2 and "data.max_response_length = 113" in said and "128" in said


def test_weights_of_another_dtype_are_refused_unless_the_engines_have_one_of_their_own(refused):
    code, said = refused("--set", "model.dtype=bfloat16")
    assert code == 2 and "model.dtype: bfloat16, and the weights in " in said and "step-7 are float32" in said
    code, said = refused(
        "--set", "model.dtype=bfloat16", "--set", "rollout.dtype=bfloat16", "--set", "reward.function=nothing"
    )
    assert "model.dtype" not in said


def test_a_folder_without_a_checkpoint(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    code, said = refused("--checkpoint", "empty")
    assert code == 4 and "empty: neither a checkpoint" in said


def test_data_and_reward_are_read_before_the_checkpoint_is_converted(refused, tmp_path):
    bad = write_jsonl(tmp_path / "bad.jsonl", ["{", "{"])
    code, said = refused("--set", f"data.val_files={bad}")
    assert code == 3 and "2 bad" in said
    mine = tmp_path / "mine.py"
    mine.write_text("import nowhere_to_be_found")
    code, said = refused("--set", f"reward.custom_reward_function.path={mine}")
    assert code == 2 and "ModuleNotFoundError" in said


class Engines(AnsweringEngines):
    """Answers every prompt with 2; notes what stood in the model's folder when it was started."""

    started: ClassVar[list] = []

    def __init__(self, order, seats, raise_if_stopped):
        super().__init__()
        self.started.append(sorted(p.name for p in Path(order.settings[0].arguments["model"]).iterdir()))

    nodes: ClassVar[dict] = {"engine 0": "here"}

    def start(self):
        pass

    def wait_started(self):
        pass

    def stop(self):
        pass

    def respond(self, requests):
        ids = (2 + ord("2") - 32,)
        return [
            Sample(r.prompt_id, r.group_id, r.sample_id, r.seed, r.prompt_ids, ids, (0.0,), "stop", 0) for r in requests
        ]


def scorers_here(order, nodes):
    """Of the product, but for Ray."""
    pool = RewardPool(order.spec, 1, log_path=order.logs / "reward.log")
    return scorers(pool, load_tokenizer(order.model_path), *nodes)


def test_an_object_store_that_is_too_small_is_told_before_any_engine_starts(world, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(evaluation, "ray_cluster", lambda deployment, actor: contextlib.nullcontext())
    monkeypatch.setattr(evaluation, "object_store_sizes", lambda deployment: {"here": 10})
    files = [f"data.val_files={world}/val.jsonl", f"model.path={world}/model"]
    settings = [part for text in files for part in ("--set", text)]
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(TINY), *settings, "-o", str(tmp_path / "out")])
    assert ended.value.code == 4 and "object store of 1 of 1 nodes is too small" in capsys.readouterr().err


def test_training_wants_room_for_its_validations_too(world, tmp_path, monkeypatch):
    """A store with room for a step and one held-out prompt, which has 16 + 4 numbers of 4 bytes and 4 log-probs; the
    file has two prompts.
    """
    held_out = write_jsonl(tmp_path / "val.jsonl", [row(f"{i}+1", "2", source="exact_match") for i in range(2)])
    overrides = [f"data.train_files={world}/val.jsonl", "data.train_batch_size=1", "actor.ppo_mini_batch_size=1"]
    overrides += [f"model.path={world}/model", "data.max_response_length=4", f"trainer.run_dir={tmp_path / 'run'}"]
    resolved = load_config(TINY, None, [*overrides, f"data.val_files={held_out}", "rollout.val_kwargs.n=1"])
    plan = plan_again(resolved.config, load_model_spec(str(world / "model")), tmp_path / "none.json")
    room = plan["memory"]["host"]["object_store_bytes"] + (16 + 4) * 4 + 4 * 4
    monkeypatch.setattr(assemble_files, "ray_cluster", lambda deployment: contextlib.nullcontext())
    monkeypatch.setattr(assemble_files, "object_store_sizes", lambda deployment: {"here": room})
    with pytest.raises(EnvironmentFault, match="of 1 of 1 nodes is too small"), open_run(RunInputs.of(resolved), False):
        pass

    def past_the_check(_):
        raise InterruptedError

    monkeypatch.setattr(assemble_files, "stop_on_signals", past_the_check)  # what comes next
    resolved = load_config(TINY, None, [*overrides, f"data.val_files={world}/val.jsonl", "rollout.val_kwargs.n=1"])
    with pytest.raises(InterruptedError), open_run(RunInputs.of(resolved), False):
        pass


def test_a_length_in_epochs_is_one_in_steps_wherever_a_start_asks(world, tmp_path, monkeypatch):
    """A resume compares it with the step of a checkpoint, and generation ahead ends with it."""
    rows = write_jsonl(tmp_path / "train.jsonl", [row(f"{i}+1", "2", source="exact_match") for i in range(6)])
    overrides = [f"data.train_files={rows}", "data.train_batch_size=2", "actor.ppo_mini_batch_size=2"]
    overrides += [f"model.path={world}/model", "trainer.total_training_steps=null", "trainer.total_epochs=2"]
    resolved = load_config(TINY, None, [*overrides, f"trainer.run_dir={tmp_path / 'run'}", "data.val_files=[]"])
    orders = []

    def begin(stack, order, *_):
        orders.append(order)
        raise InterruptedError

    monkeypatch.setattr(assemble, "find_beginning", begin)
    with pytest.raises(InterruptedError), open_run(RunInputs.of(resolved), False):
        pass
    (order,) = orders
    assert order.trainer.total_training_steps == order.identity.schedule.total_steps == 6
    assert "total_training_steps: null" in order.config_yaml, "what is recorded is what was given"


def test_a_checkpoint_is_answered_with_and_leaves_nothing_of_itself(world, tmp_path, monkeypatch, capsys):
    """Engines and Ray are stood in for; conversion, tokenizer, data and scoring are the real ones."""
    monkeypatch.setattr(evaluation, "ray_cluster", lambda deployment, actor: contextlib.nullcontext())
    monkeypatch.setattr(evaluation, "object_store_sizes", lambda deployment: {"here": 10**9})
    monkeypatch.setattr(evaluation, "RolloutGroup", Engines)
    monkeypatch.setattr(evaluation, "engine_seats", lambda deployment: None)
    monkeypatch.setattr(evaluation, "start_scorers", scorers_here)
    files = [f"data.val_files={world}/val.jsonl", "model.path=nowhere", "rollout.val_kwargs.n=2"]
    settings = [part for text in files for part in ("--set", text)]
    main(["eval", str(TINY), *settings, "--checkpoint", str(world / "run"), "-o", str(tmp_path / "out"), "--json"])
    results = json.loads(capsys.readouterr().out)
    assert results["metrics"]["val-core/exact_match/acc/mean@2"] == 1.0 and results["responses"] == {"exact_match": 2}
    assert results["checkpoint"].endswith("step-7")
    (there,) = Engines.started
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors.index.json"} <= set(there)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.resolved.yaml",
        "generations.jsonl",
        "logs",
        "results.json",
    ]


def test_a_run_stands_for_its_newest_step(world, tmp_path, monkeypatch, capsys):
    given = []

    def evaluate(resolved, checkpoint, output, console):
        given.append((checkpoint, output))
        return {"prompts": 0, "responses": {}, "seconds": 0.0, "metrics": {}}

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    monkeypatch.chdir(tmp_path)
    main(["eval", str(TINY), "--set", f"data.val_files={world}/val.jsonl", "--checkpoint", str(world / "run")])
    ((checkpoint, output),) = given
    assert checkpoint == world / "run" / "checkpoints" / "step-7" and output.name.endswith("-step-7")
    capsys.readouterr()


def test_quantised_rollouts_are_left_aside_and_it_is_said(capsys):
    words = ["model.dtype=bfloat16", "rollout.quantization=fp8", "rollout.quantization_block=32"]
    config = load_config(TINY, overrides=words).config
    assert evaluation._as_stored(config, None).rollout.fp8_block == 0
    assert "rollout.quantization is left aside" in capsys.readouterr().out
    adapted = load_config(TINY, overrides=["actor.lora.rank=8", "actor.lora.path=adapter"]).config
    assert evaluation._as_stored(adapted, None) is adapted
    assert "actor.lora.path is left aside" in capsys.readouterr().out
    assert evaluation._as_stored(adapted, Path("step-1")) is adapted and capsys.readouterr().out == ""
    plain = load_config(TINY).config
    assert evaluation._as_stored(plain, None) is plain and capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["config.resolved.yaml", "metrics.jsonl", "checkpoints"])
def test_a_run_directory_is_no_output(refused, tmp_path, name):
    """It would lose its configuration."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).touch()
    code, said = refused()
    assert code == 2 and f"out is a run directory (it has {name}); give another folder" in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


@pytest.mark.parametrize("fails", [False, True])
def test_an_evaluation_removes_what_it_made_and_nothing_of_the_user(tmp_path, fails):
    for folder in ("images", "model.tmp", "model"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.png").touch()
    with contextlib.suppress(InterruptedError), evaluation._work_folder(tmp_path) as work:
        (work / "images").mkdir()
        (work / "images" / "theirs").touch()
        if fails:
            raise InterruptedError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "logs", "model", "model.tmp"]
    assert all((tmp_path / folder / "mine.png").is_file() for folder in ("images", "model.tmp", "model"))


def test_engines_of_an_evaluation_read_images_and_the_text_model_from_its_work_folder():
    config = load_config(TINY, overrides=["model.vision=frozen", "data.max_image_pixels=5"]).config
    order = EngineOrder.of(config, model_spec(SEEING_WHOLE), Path("out/logs")).reading_from(
        Path("work/m"), Path("work/i")
    )
    for settings in order.settings:
        assert settings.images == ImageStore("work/i", 5)
        assert settings.arguments["model_loader_extra_config"] == {TEXT_FOLDER: "work/m"}
        assert not settings.awaits_weights


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> Path:
    """A model that reads images, and a run with a step of its text model."""
    folder = tmp_path_factory.mktemp("seen")
    model = folder / "model"
    write_model(model)
    (model / "config.json").write_text(json.dumps(SEEING_WHOLE))
    write_weights(model, 1.0)
    (model / "preprocessor_config.json").write_text("{}")
    step = folder / "run" / "checkpoints" / "step-7"
    step.parent.mkdir(parents=True)
    write_layout(open_hf(model), step, {"world_size": 1})
    manifest = read_manifest(step)
    write_manifest(step, replace(manifest, trainer=manifest.trainer | {TOWER: tower_digest(model)}))
    return folder


def write_weights(model: Path, of_tower: float) -> None:
    tensors = {key: np.zeros(shape, np.float32) for key, shape in stored_shapes(model_spec(SEEING_WHOLE)).items()}
    tensors["model.visual.patch_embed.proj.bias"] = np.full(4, of_tower, np.float32)
    save_file(tensors, model / "model.safetensors")


def change_config(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(SEEING_WHOLE | {"image_token_id": 9}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: None, None),
        (lambda model: write_weights(model, 2.0), "has another vision tower than the one that .*step-7 was trained"),
        (change_config, r"other: config.json\)"),
        (lambda model: (model / "chat_template.jinja").write_text("thinks"), r"other: chat_template.jinja\)"),
        (lambda model: (model / "preprocessor_config.json").write_text("{} "), r"other: preprocessor_config.json\)"),
    ],
)
def test_a_checkpoint_is_evaluated_with_the_vision_tower_that_it_was_trained_with(seen, tmp_path, change, words):
    """Also of models of one shape, such as those that think and those that do not."""
    model = tmp_path / "model"
    shutil.copytree(seen / "model", model)
    change(model)
    step = seen / "run" / "checkpoints" / "step-7"
    config = load_config(TINY, overrides=["model.vision=frozen", f"model.path={model}"]).config
    if words is None:
        assert _model_of(step, config.model, config.rollout) == model_spec(SEEING_WHOLE)
        return
    with pytest.raises(ConfigError, match=words):
        _model_of(step, config.model, config.rollout)
    text = load_config(TINY, overrides=[f"model.path={model}"]).config  # which is the checkpoint's alone
    assert _model_of(step, text.model, text.rollout)
    if "vision tower than" in words:
        source = open_mrl(step)
        with pytest.raises(ConfigError, match=f"--vision-from {model} has another vision tower"):
            open_whole(model, source)
        identity = RunIdentity.of(config)
        with pytest.raises(ConfigError, match=f"model.path: {model} has another vision tower"):
            check_same_tower(f"model.path: {model}", identity.tower, source.manifest, step)


def test_a_name_on_the_hub_becomes_a_folder_where_a_checkpoint_needs_its_vision_tower(world, tmp_path, monkeypatch):
    given = []

    def ends(resolved, checkpoint):
        given.append(resolved.config.model.path)
        raise InterruptedError

    monkeypatch.setattr(preflight, "preflight_evaluation", ends)
    monkeypatch.setattr(
        preflight,
        "with_models_at_hand",
        lambda resolved, **_: replace(resolved, config=with_values(resolved.config, {"model.path": "fetched"})),
    )
    run = ["--checkpoint", str(world / "run"), "--set", "model.path=Some/Model"]
    for vision in ("frozen", "null"):
        with pytest.raises(InterruptedError):
            main(["eval", str(TINY), *run, "--set", f"model.vision={vision}"])
    assert given == ["fetched", "Some/Model"]
