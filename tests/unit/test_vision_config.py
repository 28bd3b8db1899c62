"""Images in a configuration: what does not go with them is refused by name, and engines are told of them."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from small_model import SEEING_TEXT as TEXT
from small_model import SEEING_WHOLE as WHOLE
from small_model import write_model

from mrl.config.load import load_config
from mrl.config.rules import violations
from mrl.driver.first_look import look
from mrl.engine.requests import engine_settings
from mrl.errors import ConfigError
from mrl.model import model_spec

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml"
SEEING = ["model.vision=frozen", "actor.layout.expert_model_parallel_size=1"]


def broken(*changes: str, whole: dict = WHOLE) -> set[str]:
    resolved = load_config(TINY, overrides=[*SEEING, *changes])
    return {each.field for each in violations(resolved, model_spec(whole))}


def test_a_frozen_tower_beside_a_trained_text_model_is_legal():
    assert broken() == set()


@pytest.mark.parametrize(
    "change", ["actor.lora.rank=8", "rollout.turns={tools: [calculator]}", "cluster.placement=colocated"]
)
def test_what_is_computed_with_images_is_legal(change):
    assert broken(change) <= {"data.max_response_length"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("rollout.speculation={method: ngram, tokens: 2}", "rollout.speculation"),
        ("rollout.engine_kwargs={vllm: {mm_device_do_normalize: true}}", "rollout.engine_kwargs"),
        ("rollout.engine_kwargs={vllm: {language_model_only: true}}", "rollout.engine_kwargs"),
        ("cluster.device=npu", "cluster.device"),
        ("cluster.versions={vllm: 0.23.0}", "cluster.versions"),
        ("model.override_transformer_config={apply_rope_fusion: true}",
         "model.override_transformer_config.apply_rope_fusion"),
        ("actor.optim.vision_lr=1e-6", "actor.optim.vision_lr"),
    ],
)  # fmt: skip
def test_what_is_not_computed_with_images_is_refused_by_name(change, field):
    assert field in broken(change)


@pytest.mark.parametrize("part", ["trained", "projector"])
def test_a_tower_is_trained_where_its_gradients_are_whole(part):
    training = f"model.vision={part}"
    assert broken(training, "actor.optim.vision_lr=1e-6") == set()
    overlap = "actor.override_ddp_config={overlap_grad_reduce: true}"
    assert "actor.override_ddp_config.overlap_grad_reduce" in broken(training, overlap)
    assert "actor.override_ddp_config.overlap_grad_reduce" not in broken(overlap)
    assert "actor.lora.rank" in broken(training, "actor.lora.rank=8")
    assert "algorithm.adv_estimator" in broken(training, "algorithm.adv_estimator=gae")
    assert "trainer.schedule" in broken(training, "trainer.schedule=bounded")


EYES = WHOLE | {"image_token_id": 7, "vision_start_token_id": 9, "vision_config": {"spatial_merge_size": 2}}


def seeing_folder(folder: Path, tower: float = 1.0, mean: float = 0.5, **config) -> Path:
    """The files of a model that decide what it sees: tokens, sizes, the processor's numbers, and the tower."""
    write_model(folder)
    (folder / "config.json").write_text(json.dumps(EYES | config))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [mean] * 3}))
    (folder / "model.safetensors").unlink(missing_ok=True)
    save_file({"model.visual.merger.weight": np.full(4, tower, np.float32)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "vision", "words"),
    [
        ({}, "frozen", ""),
        ({"tower": 2.0}, "frozen", "has another vision tower than model.path"),
        ({"tower": 2.0}, "trained", ""),  # it looks through the tower of its own folder
        ({"mean": 0.4}, "frozen", "preprocessor_config.json: image_mean = [0.4, 0.4, 0.4] instead of [0.5, 0.5, 0.5]"),
        ({"image_token_id": 8}, "trained", "sees otherwise than model.path: image_token_id = 8 instead of 7"),
        ({"vision_config": {"spatial_merge_size": 3}}, "trained", "spatial_merge_size = 3 instead of 2"),
    ],
)
def test_a_reference_of_another_folder_sees_as_the_actor_does(tmp_path, change, vision, words):
    own, other = seeing_folder(tmp_path / "own"), seeing_folder(tmp_path / "other", **change)
    changes = [f"model.path={own}", f"ref.path={other}", f"model.vision={vision}", "algorithm.use_kl_loss=true"]
    config = load_config(TINY, overrides=[*SEEING, *changes])
    told = [each.rule for each in violations(config, model_spec(WHOLE), check_paths=True) if each.field == "ref.path"]
    assert len(told) == bool(words) and all(words in rule for rule in told)
    unused = load_config(TINY, overrides=[*SEEING, *changes[:3], "algorithm.use_kl_loss=false"])
    assert not [
        each for each in violations(unused, model_spec(WHOLE), check_paths=True) if "sees otherwise" in each.rule
    ]


def test_a_text_model_has_no_tower():
    text = TEXT | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 1e4, "dtype": "float32"}
    text.pop("rope_parameters")
    assert "model.vision" in broken(whole=text | {"tie_word_embeddings": False})


@pytest.mark.parametrize(("features", "legal"), [(1, True), (2, True), (3, False)])
def test_the_first_chunk_has_a_layer_for_each_of_deepstacks_features(features, legal):
    whole = WHOLE | {"vision_config": {"deepstack_visual_indexes": [*range(features)]}}
    halves = ("actor.layout.pipeline_model_parallel_size=2", "actor.layout.tensor_model_parallel_size=1",
              "actor.layout.sequence_parallel=false")  # fmt: skip
    assert ("actor.layout" not in broken(*halves, whole=whole)) == legal
    assert "actor.layout" not in broken(whole=whole)


def test_engines_are_vllms_whole_model_only_where_they_see():
    for vision in ("frozen", "null"):
        config = load_config(TINY, overrides=[f"model.vision={vision}", "data.max_image_pixels=5"]).config
        settings = engine_settings(config, model_spec(WHOLE), 0, Path("run/logs"))
        arguments = json.loads(json.dumps(settings.arguments))
        if vision == "frozen":
            assert arguments["hf_overrides"] == {"architectures": ["SeeingQwen3VL"]}
            assert (settings.images.folder, settings.images.most_pixels) == ("run/images", 5)
            assert arguments["mm_encoder_tp_mode"] == "data" and arguments["mm_device_do_normalize"] is False
        else:
            assert arguments["hf_overrides"] == {"architectures": ["Qwen3InsideVL"]}
            assert settings.images is None and not [name for name in arguments if name.startswith(("mm_", "skip_mm"))]


SEEING_MODULES = ("mrl.data.image_reader", "mrl.engine.image_inputs", "mrl.engine.seeing_models", "mrl.rank.vision")


def at_once(body: list[ast.stmt]) -> Iterator[str]:
    """What a module imports when it is imported itself: not in functions, nor for types alone."""
    for node in body:
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            yield from at_once(node.body)


def test_a_run_without_images_imports_nothing_that_reads_them():
    found = {}
    for file in sorted((ROOT / "mrl").rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        wanted = {name for name in at_once(ast.parse(file.read_text()).body) if name in SEEING_MODULES or name == "PIL"}
        if wanted and module not in SEEING_MODULES:
            found[module] = wanted
    assert found == {}


SIZES = {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}
PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "temporal_patch_size": 2,
             "merge_size": 2, "size": {"shortest_edge": 4096, "longest_edge": 65536}}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image_processor_type": "CLIPImageProcessor"}, "is CLIPImageProcessorPil"),
        ({"patch_size": 14}, "vision_config.patch_size of config.json is 16"),
        ({"do_resize": False}, "do_resize: false"),
        (None, "has no image processor"),
        ({}, ""),
    ],
)
def test_validate_refuses_the_processor_that_train_refuses(tmp_path, change, words):
    folder = tmp_path / "model"
    write_model(folder)
    (folder / "config.json").write_text(json.dumps(WHOLE | {"vision_config": SIZES}))
    if change is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | change))
    config = load_config(TINY, overrides=[*SEEING, f"model.path={folder}"]).config
    if not words:
        look(config)
        return
    with pytest.raises(ConfigError, match=words):
        look(config)
