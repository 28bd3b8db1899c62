"""The table of verl's keys: what it knows, and how scripts/generate_verl_keys.py reads it from wheels."""

import importlib.util
import zipfile
from pathlib import Path

from mrl.tools.import_verl.verl_keys import is_verls, nearest, releases

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("generate_verl_keys", ROOT / "scripts" / "generate_verl_keys.py")
generate = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generate)

CONFIG = """
defaults: [other]
actor_rollout_ref:
  rollout:
    _target_: verl.workers.config.RolloutConfig
    temperature: 1.0
    engine_kwargs: {}
    lora: {rank: 0}
  actor: {override_config: {written: 1}}
trainer: {nnodes: 1}
data: {custom_cls: {path: null}}
"""
CLASSES = """
from dataclasses import dataclass, field

@dataclass
class Base:
    inherited: int = 0

@dataclass
class Sampling:
    top_p: float = 1.0

@dataclass
class RolloutConfig(Base):
    temperature: float = 1.0
    repetition_penalty: float = 1.0
    val_kwargs: Sampling = field(default_factory=Sampling)
    custom: dict = field(default_factory=dict)
    lora: dict = field(default_factory=dict)
    _hidden: int = 0
"""
READS = 'self.config.trainer.get("late", 1)\nother.get("nothing")\n'


def wheel(folder: Path, release: str, config: str) -> Path:
    path = folder / f"verl-{release}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("verl/trainer/config/_generated_ppo_trainer.yaml", config)
        archive.writestr("verl/workers/config/rollout.py", CLASSES)
        archive.writestr("verl/trainer/main.py", READS)
        archive.writestr("verl/utils/dataset/rl_dataset.py", 'config.get("image_key", "images")')
    return path


def test_keys_are_those_of_configurations_their_dataclasses_and_of_what_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "TARGET", tmp_path / "keys.txt")
    older = wheel(tmp_path, "0.9.0", CONFIG.replace("nnodes: 1", "nnodes: 1, old: 2"))
    generate.main([str(wheel(tmp_path, "0.10.0", CONFIG)), str(older)])
    lines = [line for line in (tmp_path / "keys.txt").read_text().splitlines() if not line.startswith("#")]
    rollout = "actor_rollout_ref.rollout."
    both = {
        *(f"{rollout}{name}" for name in ("temperature", "repetition_penalty", "inherited", "val_kwargs.top_p")),
        *(f"{rollout}{name}" for name in ("engine_kwargs.*", "custom.*", "lora.rank")),
        "actor_rollout_ref.actor.override_config.*", "trainer.nnodes", "trainer.late", "data.custom_cls.path",
        "data.image_key", *(f"{name}.*" for name in generate._NAMED_BY_THE_USER),
    }  # fmt: skip
    assert set(lines) == {f"0.9.0 0.10.0 {key}" for key in both} | {"0.9.0 0.9.0 trainer.old"}


def test_what_is_in_the_table_is_known():
    for key in ("data.datagen.path", "actor_rollout_ref.rollout", "hydra.run.dir", "trainer.v1.trainer_mode"):
        assert is_verls(key)
    for key in ("data.datagen.pth", "actor_rollout_ref.rollout.min_p", "trainer.v1.mode", ""):
        assert not is_verls(key)
    assert nearest("trainer.total_epoch") == "trainer.total_epochs" and not nearest("trainer.xyzzy")
    for other in ("actor.dtype", "rollout.sid_category", "actor.roles"):  # a long section makes no name alike
        assert not nearest(f"actor_rollout_ref.{other}")
    assert len(releases()) >= 10 and releases()[-1] == "0.9.1"
