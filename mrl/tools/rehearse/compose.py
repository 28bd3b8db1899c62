"""Builds a rehearsal from a configuration: a small configuration, what changed, and what it cannot exercise.

Everything else stays the same: placement, offload, recompute, batching, replay, loss, sampling, corrections. It reads
no file except whether given paths exist.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import floor, lcm
from pathlib import Path
from typing import Any

from mrl.config.schema import RunConfig, leaf
from mrl.config.yaml_tree import dump_value
from mrl.model.layout_degrees import LayoutDegrees
from mrl.tools.rehearse.device_keys import device_changes
from mrl.tools.rehearse.notes import Change, OutOfReach
from mrl.tools.rehearse.small_batch import PROMPT, SmallBatch, small_batch, updates_changed
from mrl.tools.rehearse.small_layout import SmallLayout, small_layout

FP8_BLOCK = 32  # rows and columns with one scale: a head of the small model, and a share of its experts
TEACHER_TOP_K = 64  # most words
LORA_RANK = 16  # largest rank: no weight of the small model has a shorter side
EPOCHS = 2  # at most
STEPS = 2  # one step, a save, a resume, one step
VALIDATION_ROWS = 4
# most turns of a response, most characters of an answer
TURNS = 3
ANSWER = 24
NOT_HERE = "a file that it names is not here, so responses are of one turn"
NO_AGENT = "random weights say nothing that an agent could use, so none is started and responses are of one turn"
# longest start and longest call, even on a busy machine
START_S = 600.0
CALL_S = 300.0


@dataclass(frozen=True)
class WorkFolder:
    """The folder that a rehearsal writes into."""

    path: Path

    @property
    def marker(self) -> Path:
        """A file that marks the folder as a rehearsal's. The next rehearsal may empty such a folder."""
        return self.path / ".rehearsal"

    @property
    def model(self) -> Path:
        """The folder of checkpoint and tokenizer."""
        return self.path / "model"

    @property
    def config(self) -> Path:
        """The rehearsal's configuration."""
        return self.path / "rehearsal.yaml"

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.path / "run"

    @property
    def exercised(self) -> Path:
        """The folder in which the run's processes write what code ran (watched.py)."""
        return self.path / "exercised"

    @property
    def hook(self) -> Path:
        """The folder that is first where the run's processes look for modules (watched.py)."""
        return self.path / "hook"

    @property
    def reward(self) -> Path:
        """The file of the reward function."""
        return self.path / "reward.py"

    def rows(self, kind: str, number: int) -> Path:
        """Returns a file of prompts. `kind` is train or val."""
        return self.path / "data" / f"{kind}-{number}.jsonl"

    def log(self, phase: str) -> Path:
        """Returns the file with a command's output."""
        return self.path / f"{phase}.log"


@dataclass(frozen=True)
class Rehearsal:
    """The configuration to run, and how it differs from the given one."""

    original: RunConfig
    config: RunConfig
    layout: SmallLayout
    batch: SmallBatch
    changes: tuple[Change, ...]
    out_of_reach: tuple[OutOfReach, ...]

    @property
    def processes(self) -> int:
        """Number of ranks and engine workers."""
        return self.layout.ranks + self.layout.engines.world_size

    def to_yaml(self) -> str:
        """Writes the configuration. Each changed value shows its original value and the reason."""
        changed = {change.key: f"  # {dump_value(change.was)}: {change.why}" for change in self.changes}
        head = (
            "# Written by mrl rehearse. Where a value differs from the original configuration, the original follows it."
        )
        return "\n".join([head, *_lines(self.config.model_dump(), changed), ""])


def compose(
    original: RunConfig, work: WorkFolder, cpus: int, least_prompt: int = PROMPT, has_tools: bool = True
) -> Rehearsal:
    """Builds the rehearsal of a legal configuration for a machine with `cpus` CPUs. Its files do not exist yet.

    `least_prompt` is the tokens of a prompt of a few words under the chat template. `has_tools` says whether the file
    of tools is here, where one is named.
    """
    layout = small_layout(original)
    layouts = [LayoutDegrees.of(each) for each in (layout.actor, layout.critic) if each is not None]
    replicas = lcm(*(each.data_parallel_size for each in layouts))
    batch = small_batch(original, replicas, lcm(*(each.sequence_parts for each in layouts)), least_prompt)
    on_cpu, lost = device_changes(original)
    changes = [*_layout_changes(original, layout), *batch.changes, *on_cpu, *_cluster(original, layout, cpus)]
    changes += [*_files(original, work), *_schedule(original, batch), *_reference(original)]
    changes += [*_adapters(original), *_teacher(original, work), *_quantisation(original)]
    changes += _critic(original, layout, batch)
    changes += _turns(original) if has_tools else _no_turns(original)
    changes = [change for change in changes if change.now != change.was]
    fewer = [OutOfReach("actor.ppo_mini_batch_size", text) for text in updates_changed(original, batch)]
    lost += [*layout.out_of_reach, *fewer, *_teacher_lost(original)]
    lost += [] if has_tools else [OutOfReach("rollout.turns", _why_not(original))]
    return Rehearsal(original, _applied(original, changes), layout, batch, tuple(changes), tuple(lost))


def _applied(original: RunConfig, changes: list[Change]) -> RunConfig:
    values = original.model_dump()
    for change in changes:
        *path, name = change.key.split(".")
        section = values
        for part in path:
            section = section[part]
        section[name] = change.now
    return RunConfig.model_validate(values)


def _why_not(original: RunConfig) -> str:
    """Says why responses have one turn."""
    if original.rollout.endpoint:
        return NO_AGENT
    return NOT_HERE


def _no_turns(original: RunConfig) -> Iterator[Change]:
    why = _why_not(original)
    yield Change("rollout.turns", original.rollout.turns.model_dump(), None, why)
    yield Change("rollout.endpoint", original.rollout.endpoint, False, why)
    yield Change("rollout.agent", original.rollout.agent and original.rollout.agent.model_dump(), None, why)


def _turns(original: RunConfig) -> Iterator[Change]:
    """Keeps the user's tools and environments, with few calls of each."""
    turns = original.rollout.turns
    if turns is None:
        return
    for name in ("path", "index", "tool_config_path"):
        was = getattr(turns, name)
        yield Change(f"rollout.turns.{name}", was, was and str(Path(was).expanduser().resolve()), "absolute")
    for name, most in (("max_turns", TURNS), ("max_answer_characters", ANSWER), ("num_workers", 1)):
        was = getattr(turns, name)
        yield Change(f"rollout.turns.{name}", was, min(was, most), "in small")


def _layout_changes(original: RunConfig, layout: SmallLayout) -> Iterator[Change]:
    for name, value in layout.actor.items():
        yield Change(f"actor.layout.{name}", getattr(original.actor.layout, name), value, "in small")
    engines = {
        "num_engines": layout.engines.num_engines,
        "tensor_model_parallel_size": layout.engines.tensor,
        "data_parallel_size": layout.engines.data,
        "expert_parallel_size": layout.engines.expert,
        "cpu_kvcache_gib": 1,
    }
    for name, value in engines.items():
        yield Change(f"rollout.{name}", getattr(original.rollout, name), value, "in small")
    recomputed = original.model.override_transformer_config.get("recompute_num_layers")
    if recomputed is not None and recomputed > 1:
        yield Change("model.override_transformer_config.recompute_num_layers", recomputed, 1, "in small")


def _cluster(original: RunConfig, layout: SmallLayout, cpus: int) -> Iterator[Change]:
    colocated = original.cluster.placement == "colocated"
    devices = max(layout.ranks, layout.engines.world_size) if colocated else layout.ranks + layout.engines.world_size
    share = min(1.0, floor(100 * cpus / (layout.ranks + layout.engines.world_size)) / 100)
    values = {
        "device": "cpu",
        "nnodes": 1,
        "n_gpus_per_node": devices,
        "accelerator": None,
        "calibration": None,
        "versions": {},
        "address": None,
        "port": None,
        "cpus_per_actor": share,
        "cpus_per_engine": share,
        "start_timeout_s": min(original.cluster.start_timeout_s, START_S),
        "step_timeout_s": min(original.cluster.step_timeout_s, CALL_S),
    }
    for name, value in values.items():
        yield Change(f"cluster.{name}", getattr(original.cluster, name), value, "this machine")
    for name, limit in (("start_timeout_s", START_S), ("generate_timeout_s", CALL_S)):
        was = getattr(original.rollout, name)
        yield Change(f"rollout.{name}", was, min(was, limit), "this machine")
    yield Change(
        "reshard.timeout_s", original.reshard.timeout_s, min(original.reshard.timeout_s, CALL_S), "this machine"
    )


def _files(original: RunConfig, work: WorkFolder) -> Iterator[Change]:
    """Yields changes that point paths into the work folder. A user's own loss is read from its own place."""
    yield Change("model.path", original.model.path, str(work.model), "random weights")
    yield Change("trainer.run_dir", original.trainer.run_dir, str(work.run), "the work folder")
    if original.trainer.resume_mode == "resume_path":
        yield Change("trainer.resume_mode", "resume_path", "disable", "a checkpoint of the large model")
        yield Change(
            "trainer.resume_from_path", original.trainer.resume_from_path, None, "a checkpoint of the large model"
        )
    for kind in ("train", "val"):
        files = leaf(original, f"data.{kind}_files")
        names = tuple(str(work.rows(kind, i)) for i in range(max(len(files), kind == "train")))
        yield Change(f"data.{kind}_files", files, names, "few rows")
    scoring = {"path": str(work.reward), "name": "compute_score", "reward_kwargs": {}}
    custom = original.reward.custom_reward_function
    yield Change(
        "reward.custom_reward_function", custom.model_dump() if custom else None, scoring, "calls the same function"
    )
    yield Change("reward.num_workers", original.reward.num_workers, 1, "sees all responses to a prompt")
    if (loss := original.algorithm.policy_loss.custom) is not None:
        yield Change("algorithm.policy_loss.custom.path", loss.path, str(Path(loss.path).resolve()), "absolute")
    if (own := original.algorithm.custom_advantage) is not None:
        yield Change("algorithm.custom_advantage.path", own.path, str(Path(own.path).resolve()), "absolute")


def _schedule(original: RunConfig, batch: SmallBatch) -> Iterator[Change]:
    trainer = original.trainer
    optim = original.actor.optim
    epochs = min(original.actor.ppo_epochs, EPOCHS)
    # updates of one step, with which a rehearsal begins
    updates = epochs * batch["data.train_batch_size"] // batch["actor.ppo_mini_batch_size"]
    constant = optim.lr_decay_style == "constant"
    warmup = 0
    if constant or updates > 1 or optim.lr_decay_steps:
        warmup = min(optim.lr_warmup_steps, 1)
    values = {
        "trainer.total_training_steps": STEPS,
        "trainer.save_freq": 1,
        "trainer.test_freq": min(trainer.test_freq, STEPS),
        "trainer.val_only": False,
        "trainer.max_actor_ckpt_to_keep": STEPS,
        "actor.ppo_epochs": epochs,
        "data.val_max_samples": VALIDATION_ROWS if original.data.val_files else original.data.val_max_samples,
        "rollout.val_kwargs.n": min(original.rollout.val_kwargs.n, 2),
        "actor.optim.lr_warmup_steps": warmup,
        "actor.optim.lr_warmup_init": optim.lr_warmup_init if warmup else 0.0,
        "actor.optim.lr_decay_steps": optim.lr_decay_steps and min(optim.lr_decay_steps, STEPS * updates + 1),
    }
    for key, value in values.items():
        yield Change(key, leaf(original, key), value, f"{STEPS} steps")


def _reference(original: RunConfig) -> Iterator[Change]:
    if original.ref.path is None:
        return
    yield Change("ref.path", original.ref.path, None, "the actor's start, of the same shape")
    if original.actor.lora.rank:
        why = "the small reference is the actor without its adapters"
        yield Change("ref.param_offload", original.ref.param_offload, False, why)


def _teacher(original: RunConfig, work: WorkFolder) -> Iterator[Change]:
    distillation = original.distillation
    if not distillation.enabled:
        return
    teacher = distillation.teacher_model
    key = "distillation.teacher_model"
    layout = teacher.layout and teacher.layout.model_dump()
    yield Change(f"{key}.model_path", teacher.model_path, str(work.model), "the actor's start, of the same shape")
    yield Change(f"{key}.layout", layout, None, "a model of the actor's shape lies as the actor does")
    given = teacher.override_transformer_config
    yield Change(f"{key}.override_transformer_config", given, {}, "fields of the large teacher")
    top_k = distillation.distillation_loss.topk
    yield Change("distillation.distillation_loss.topk", top_k, min(top_k, TEACHER_TOP_K), "in small")


def _teacher_lost(original: RunConfig) -> Iterator[OutOfReach]:
    distillation = original.distillation
    if distillation.enabled and distillation.teacher_model.layout is not None:
        yield OutOfReach("distillation.teacher_model.layout", "the small teacher lies as the actor does")


def _adapters(original: RunConfig) -> Iterator[Change]:
    lora = original.actor.lora
    yield Change("actor.lora.rank", lora.rank, min(lora.rank, LORA_RANK), "a small model's weights have short sides")
    yield Change("actor.lora.path", lora.path, None, "an adapter of the large model")


def _quantisation(original: RunConfig) -> Iterator[Change]:
    if original.rollout.quantization is not None:
        why = "widths and heads of the small model have whole blocks of no larger ones"
        yield Change("rollout.quantization_block", original.rollout.quantization_block, FP8_BLOCK, why)


def _critic(original: RunConfig, layout: SmallLayout, batch: SmallBatch) -> Iterator[Change]:
    """Lets every step train both models, because two steps are too few for a critic alone."""
    critic = original.critic
    mini = None
    if critic.ppo_mini_batch_size is not None:
        wanted = original.data.train_batch_size // critic.ppo_mini_batch_size
        prompts = batch["data.train_batch_size"]
        most = prompts // batch["actor.ppo_mini_batch_size"]  # samples of those divide over data parallelism
        mini = prompts // max(each for each in range(1, most + 1) if most % each == 0 and each <= max(wanted, 1))
    yield Change("critic.layout", critic.layout and critic.layout.model_dump(), layout.critic, "in small")
    yield Change("critic.path", critic.path, None, "the actor's start, of the same shape")
    yield Change("critic.ppo_mini_batch_size", critic.ppo_mini_batch_size, mini, "in small")
    epochs = critic.ppo_epochs and min(critic.ppo_epochs, EPOCHS)
    yield Change("critic.ppo_epochs", critic.ppo_epochs, epochs, "in small")
    yield Change("critic.optim.lr_warmup_steps", critic.optim.lr_warmup_steps, 0, f"{STEPS} steps")
    yield Change("critic.optim.lr_warmup_init", critic.optim.lr_warmup_init, 0.0, f"{STEPS} steps")
    yield Change("critic.optim.lr_decay_steps", critic.optim.lr_decay_steps, None, f"{STEPS} steps")
    yield Change("trainer.critic_warmup", original.trainer.critic_warmup, 0, f"{STEPS} steps")


def _lines(values: dict[str, Any], changed: dict[str, str], prefix: str = "") -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in values.items():
        key = prefix + name
        remark = changed.get(prefix + name, "")
        if isinstance(value, dict) and value and not remark:
            yield f"{indent}{dump_value(name)}:"
            yield from _lines(value, changed, f"{key}.")
        else:
            yield f"{indent}{dump_value(name)}: {dump_value(_plain(value))}{remark}"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return value
