"""What a run consists of, built in an order in which cheap checks come first, and taken down in reverse."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mrl.checkpoint.manifest import Manifest, Newest
from mrl.cluster.actor_group import ActorGroup
from mrl.cluster.ray_cluster import ray_cluster
from mrl.cluster.rollout_group import RolloutGroup
from mrl.cluster.weight_sync import WeightSync
from mrl.config.load import ResolvedConfig
from mrl.config.schema import RunConfig
from mrl.data.dataset import PromptDataset
from mrl.data.order import DataCursor, PromptStream
from mrl.data.tokenizer import load_tokenizer
from mrl.errors import DataError, NothingToDo
from mrl.model import load_model_spec
from mrl.plan.stored_plan import plan_again, plan_text
from mrl.record.loggers import RunInfo
from mrl.record.run_dir import RunDir, read_metrics, write_text
from mrl.record.sinks import make_sinks
from mrl.reward.pool import RewardPool, check_function
from mrl.train.advice import AdvisedRecord
from mrl.train.background_save import BackgroundWrite
from mrl.train.inputs import load_training, load_validation, reward_pool, reward_spec
from mrl.train.preflight import resume_point, run_dir_path
from mrl.train.stop import StopFlag, stop_on_signals


@dataclass(frozen=True)
class TrainState:
    """What a finished step leaves behind, weights aside. It is in every checkpoint."""

    step: int = 0  # steps finished; also the version of the weights
    cursor: DataCursor = field(default_factory=DataCursor)

    def advanced(self, cursor: DataCursor) -> "TrainState":
        """After one more step."""
        return TrainState(self.step + 1, cursor)


@dataclass
class Run:
    """A run under way. Only the last five change."""

    config: RunConfig
    run_dir: RunDir
    tokenizer: Any
    train_prompts: PromptStream
    val_prompts: PromptDataset | None
    total_steps: int
    stop: StopFlag
    record: AdvisedRecord
    rewards: RewardPool
    actor: ActorGroup
    engines: RolloutGroup
    sync: WeightSync
    writing: BackgroundWrite
    state: TrainState = field(default_factory=TrainState)
    saved_step: int = 0  # of the newest complete checkpoint
    failed_saves: int = 0
    last_fault: str = ""  # why the newest of them failed


@contextmanager
def open_run(resolved: ResolvedConfig, resume: bool) -> Iterator[Run]:
    """Everything that a run needs, ready for its next step; `resolved` has passed `mrl.train.preflight`.

    Raises one of mrl.errors. The run directory is made once the data, the reward and the cluster are known to be right.
    """
    config = resolved.config
    with ExitStack() as stack:
        tokenizer = load_tokenizer(config.model.path)
        stream, val = load_training(config, tokenizer), load_validation(config, tokenizer)
        scoring = reward_spec(config, stream.prompts.data_sources | (val.data_sources if val else frozenset()))
        check_function(scoring)
        total = config.trainer.total_training_steps or config.trainer.total_epochs * stream.steps_per_epoch
        config = _with_total(config, total)
        path = run_dir_path(config, resume)
        point = _resume_point(config, path, stream) if resume else None
        stack.enter_context(ray_cluster(config))
        stop = stack.enter_context(stop_on_signals())  # after Ray, whose own handlers abort the process
        run_dir = RunDir.open(path, resolved.to_yaml(), resume)
        stack.callback(run_dir.close)
        checkpoint, state = _rewind(run_dir, point) if resume else (None, TrainState())
        rewards = stack.enter_context(reward_pool(config, scoring, run_dir.logs))
        engines = RolloutGroup(config, run_dir.path, stop.raise_if_set)
        stack.callback(engines.stop)
        actor = ActorGroup(config, run_dir.path, checkpoint, stop.raise_if_set)
        stack.callback(actor.stop)
        engines.wait_started()
        run_dir.write_config(resolved.to_yaml())
        write_text(run_dir.plan, plan_text(plan_again(config, load_model_spec(config.model.path), run_dir.plan)))
        record = AdvisedRecord(make_sinks(config.trainer.logger, run_dir, total, _run_info(config)), config)
        stack.callback(record.close)
        sync = WeightSync(config, actor, engines)
        writing = BackgroundWrite()
        stack.callback(writing.close)  # before the ranks end
        yield Run(config, run_dir, tokenizer, stream, val, total, stop, record, rewards, actor, engines, sync, writing, state, state.step)


def _run_info(config: RunConfig) -> RunInfo:
    trainer = config.trainer
    return RunInfo(trainer.project_name, trainer.experiment_name, config.model_dump(mode="json"), trainer.logger_timeout_s)


def _with_total(config: RunConfig, total: int) -> RunConfig:
    """The length in steps is known to everybody, the learning-rate schedule included, however it was given."""
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"total_training_steps": total})})


def _resume_point(config: RunConfig, path: Path, stream: PromptStream) -> Newest:
    """Where the run in `path` goes on, every byte of it read. Writes nothing. Raises NothingToDo when its last step is done."""
    point = resume_point(config, path, digests=True)
    if point.manifest is None:
        return point
    _check_same_data(point.manifest, stream, point.path)
    total, lines = config.trainer.total_training_steps, read_metrics(RunDir(path).metrics)
    if point.manifest.step >= total and lines and lines[-1]["training/global_step"] >= point.manifest.step:
        raise NothingToDo(
            f"{path} has {point.manifest.step} steps already, of the {total} of trainer.total_training_steps; raise it to train on"
        )
    return point


def _rewind(run_dir: RunDir, point: Newest) -> tuple[Path | None, TrainState]:
    """Removes what was recorded past the checkpoint; its folder and state. A run without one starts anew."""
    if point.manifest is None:
        print(f"{run_dir.path} has no checkpoint yet: it starts anew")
        run_dir.truncate_metrics(-1)
        return None, TrainState()
    for damaged, reason in point.damaged.items():
        print(f"not resumed from {damaged.name}, which is kept as {set_aside(damaged).name}: {reason}")
    run_dir.truncate_metrics(point.manifest.step)
    _restore_line(point.manifest, run_dir)
    return point.path, TrainState(point.manifest.step, DataCursor(**point.manifest.trainer["cursor"]))


def set_aside(checkpoint: Path) -> Path:
    """Renames a damaged `step-N` to `damaged-step-N`, so that a step trained again can be saved under its name; returns the new path."""
    aside = checkpoint.with_name(f"damaged-{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)  # of an earlier time
    return checkpoint.rename(aside)


def _check_same_data(manifest: Manifest, stream: PromptStream, folder: Path) -> None:
    if manifest.trainer["data_fingerprint"] != stream.prompts.fingerprint:
        raise DataError(
            f"{folder} was trained on other prompts than data.train_files gives now, so its place in the data means nothing here; "
            "give the same files, tokenizer and limits, or start a new run from an export of the checkpoint (mrl convert megatron-to-hf)"
        )


def _restore_line(manifest: Manifest, run_dir: RunDir) -> None:
    """A run killed between saving and writing the step's line lost that line; the checkpoint has it."""
    rows = read_metrics(run_dir.metrics)
    line = manifest.trainer["metrics"]
    if line and (not rows or rows[-1]["training/global_step"] < manifest.step):
        from mrl.record.sinks import JsonlSink

        sink = JsonlSink(run_dir.metrics)
        sink.write(manifest.step, line)
        sink.close()
