"""What a run consists of: built from its configuration, cheap checks first, and taken down in reverse.

Also ending it on a signal: the current phase stops where stopping is safe, the state is saved, the exit code says
resumable.
"""

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from mrl.checkpoint.room import route_bytes
from mrl.cluster.actor_group import ActorGroup
from mrl.cluster.gates import MemoryGate
from mrl.cluster.group_writer import GroupWriter
from mrl.cluster.machines import Machines, Peak
from mrl.cluster.prerequisites import check_object_stores
from mrl.cluster.process_logs import with_log_tails
from mrl.cluster.ray_cluster import object_store_sizes, ray_cluster
from mrl.cluster.rollout_group import RolloutGroup
from mrl.cluster.sample_writer import SampleWriter
from mrl.cluster.scoring import start_scorers
from mrl.cluster.seats import shared_seats
from mrl.cluster.weight_sync import WeightSync
from mrl.config.load import ResolvedConfig
from mrl.config.schedule_rules import schedule_of
from mrl.config.schema import RunConfig
from mrl.config.schema_actor import OPTIMIZER
from mrl.data.dataset import PromptDataset, PromptParameters, load_tokenizer
from mrl.data.order import PromptStream
from mrl.errors import DamagedCheckpoint, Interrupted, LostLock
from mrl.model import load_model_spec
from mrl.plan.run_plan import plan_again, plan_text
from mrl.platforms.versions import installed_versions
from mrl.record.attempts import UnderWay, attempt
from mrl.record.loggers import RunInfo
from mrl.record.run_dir import RunDir, write_text
from mrl.record.sinks import make_sinks
from mrl.record.views import View
from mrl.reward.items import RewardSpec
from mrl.reward.pool import check_function
from mrl.reward.resolve import check_data_sources
from mrl.train.ahead import Ahead, GenerationAhead
from mrl.train.generation import Generation, InTurn
from mrl.train.kept_groups import read_kept
from mrl.train.lost_engines import LostEngines
from mrl.train.placement import Colocated, Placement, Separate
from mrl.train.preflight import run_dir_path
from mrl.train.reporting import AdvisedRecord
from mrl.train.resume import TrainState, generated_again, made_by, resume_point, resumed_state, rewind
from mrl.train.rollouts import Responder
from mrl.train.saving import Saver
from mrl.train.spool import Spool

VALIDATION_SAMPLE = 0  # seed of the sample of held-out prompts


class StopFlag:
    """Set by SIGTERM or SIGINT. A second signal ends the process at once, unsaved."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.on_hold = False  # true while something is half-done

    def hold(self) -> None:
        """From here on something is half-done: `raise_if_set` waits for `release`."""
        self.on_hold = True

    def release(self) -> None:
        """Nothing is half-done any more. Raises Interrupted if a signal came meanwhile."""
        self.on_hold = False
        self.raise_if_set()

    def raise_if_set(self) -> None:
        """Raises Interrupted once a signal has come and nothing is half-done."""
        if self.signal is not None and not self.on_hold:
            raise Interrupted(f"stopped by {signal.Signals(self.signal).name}")

    def _receive(self, number: int, _frame) -> None:
        if self.signal is not None:
            os._exit(Interrupted.exit_code)
        self.signal = number


@contextmanager
def stop_on_signals(flag: StopFlag) -> Iterator[StopFlag]:
    """Sets the flag on SIGTERM and SIGINT for the time of the block."""
    before = {number: signal.signal(number, flag._receive) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class Run:
    """A run under way: what the loop hands to its phases, each taking what it uses. Only the last three change."""

    config: RunConfig
    run_dir: RunDir
    val_prompts: PromptDataset | None
    total_steps: int
    stop: StopFlag
    record: AdvisedRecord
    responder: Responder
    actor: ActorGroup
    placement: Placement
    saver: Saver
    sample_writer: SampleWriter
    generation: Generation
    machines: Machines
    peak: Peak
    state: TrainState  # of the weights that the ranks hold
    is_whole: bool = True  # false while an update changes them
    line: dict[str, float] = field(default_factory=dict)  # metrics of the step that made them, as far as known


@contextmanager
def open_run(resolved: ResolvedConfig, resume: bool, views: Mapping[str, View] | None = None) -> Iterator[Run]:
    """Everything that a run needs, ready for its next step; `resolved` has passed `mrl.train.preflight`.

    `views`: of its metrics, beside those that trainer.logger names.

    A checkpoint whose bytes its ranks find damaged is passed over: the run starts again, from the one before. Raises
    one of mrl.errors. The run directory is made once the data, the reward and the cluster are known to be right.
    """
    damaged: dict[Path, DamagedCheckpoint] = {}
    stop = StopFlag()
    start = partial(_start, resolved, resume, damaged, views, stop)
    with ExitStack() as stack:
        while (run := _unless_damaged(start, resume, damaged, stack)) is None:
            stop.raise_if_set()
            print("the run starts again, without the damaged checkpoint", flush=True)
        yield run


def _unless_damaged(
    start: Callable[[ExitStack], Run], resume: bool, damaged: dict[Path, DamagedCheckpoint], stack: ExitStack
) -> Run | None:
    """The run, which `stack` will take down; None where its checkpoint is damaged, which `damaged` then has too."""
    try:
        with ExitStack() as own:
            run = start(own)
            stack.push(own.pop_all())
            return run
    except DamagedCheckpoint as error:
        if not resume or error.folder in damaged:
            raise
        damaged[error.folder] = DamagedCheckpoint(*error.args)  # as it is it would keep all that the start had made
        return None


def _start(
    resolved: ResolvedConfig,
    resume: bool,
    damaged: Mapping[Path, DamagedCheckpoint],
    views: Mapping[str, View] | None,
    stop: StopFlag,
    stack: ExitStack,
) -> Run:
    """From the newest checkpoint that is not in `damaged`."""
    config = resolved.config
    tokenizer = load_tokenizer(config.model.path)
    stream, val = load_training(config, tokenizer), load_validation(config, tokenizer)
    scoring = reward_spec(config, stream.prompts.data_sources | (val.data_sources if val else frozenset()))
    check_function(scoring)
    total = config.trainer.total_training_steps or config.trainer.total_epochs * stream.steps_per_epoch
    config = _with_total(config, total)
    path = run_dir_path(config, resume)
    point = resume_point(config, path, resume, damaged, stream.prompts.fingerprint)
    stack.enter_context(ray_cluster(config))
    plan = plan_again(config, load_model_spec(config.model.path), RunDir(path).plan, len(val) if val else None)
    check_object_stores(plan["memory"]["host"]["object_store_bytes"], object_store_sizes(config))
    stack.enter_context(stop_on_signals(stop))  # after Ray, whose own handlers abort the process
    run_dir = RunDir.open(path, resolved.to_yaml(), resume, stop.raise_if_set)
    stack.callback(run_dir.close)
    checkpoint, state = point and point.path, resumed_state(point)
    check = run_dir.check_lock
    poll = partial(_poll, run_dir, stop)
    note_generated_again = stack.enter_context(attempt(run_dir.path, state.step, installed_versions(), check))
    ahead = stack.enter_context(_ahead(config, run_dir, stream.prompts.fingerprint))
    if ahead is not None and state.step:
        state = replace(state, ahead=read_kept(checkpoint, point.manifest.trainer["ahead"], ahead.spool))
    stack.enter_context(with_log_tails(run_dir.logs))
    engines, actor = stack.enter_context(_processes(config, run_dir.path, checkpoint, poll))
    actor.read_routes_at(engines.nodes.values())
    rewards = stack.enter_context(start_scorers(config, scoring, run_dir.logs, engines.nodes))
    placement = _placement(config, actor, engines, plan)
    saver = Saver(config, run_dir.checkpoints, placement, stream.prompts.fingerprint, state.step, check)
    stack.callback(saver.close)  # before the ranks end
    sample_writer = SampleWriter(run_dir.samples, config.cluster.step_timeout_s, config.record)
    stack.callback(sample_writer.close)
    machines = Machines(config, actor, engines)
    peak = machines.peak()
    note_generated_again(generated_again(config, run_dir, point))
    rewind(run_dir, point)  # nothing refuses any more: from here on the run is another than it was
    run_dir.write_config(resolved.to_yaml())
    write_text(run_dir.plan, plan_text(plan))
    sinks = make_sinks(config.trainer.logger, run_dir, total, _run_info(config), views)
    record = AdvisedRecord(sinks, config, UnderWay(run_dir.path, state.step, check))
    stack.callback(record.close)
    responder = Responder(engines, rewards, config.reward, record, poll)
    return Run(
        config=config, run_dir=run_dir, val_prompts=val, total_steps=total,
        stop=stop, record=record, responder=responder, actor=actor, placement=placement, saver=saver,
        sample_writer=sample_writer,
        generation=stack.enter_context(closing(_generation(config, responder, stream, state, ahead))),
        machines=machines, peak=peak, state=state,
    )  # fmt: skip


def _poll(run_dir: RunDir, stop: StopFlag) -> None:
    """Raises LostLock once the run directory is another process's, and Interrupted once the run is to stop."""
    run_dir.raise_if_lost()
    stop.raise_if_set()


@contextmanager
def _processes(
    config: RunConfig, folder: Path, checkpoint: Path | None, poll: Callable[[], None]
) -> Iterator[tuple[RolloutGroup, ActorGroup]]:
    """Engines and ranks, started.

    On shared devices engines start first and sleep: vLLM measures what is free of a device, and a model that comes onto
    it meanwhile would be counted as its own.
    """
    with ExitStack() as stack:
        if config.cluster.placement == "separate":
            engines = RolloutGroup(config, folder, poll)
            stack.callback(engines.stop)
            actor = ActorGroup(config, folder, checkpoint, poll)
            stack.callback(actor.stop)
            engines.wait_started()
        else:
            seats = shared_seats(config)
            stack.callback(seats.release)
            engines = RolloutGroup(config, folder, poll, seats.engines)
            stack.callback(engines.stop)
            engines.wait_started()
            engines.sleep()
            actor = ActorGroup(config, folder, checkpoint, poll, seats=seats.ranks)
            stack.callback(actor.stop)
        yield engines, actor


def _placement(config: RunConfig, actor: ActorGroup, engines: RolloutGroup, plan: dict[str, Any]) -> Placement:
    sync = WeightSync(config, actor, engines)
    if config.cluster.placement == "separate":
        return Separate(actor, sync)
    gate = MemoryGate(plan, actor, engines, config.cluster.step_timeout_s)
    beside_log_probs = plan["memory"]["phases"].get("rollout_to_log_prob", {}).get("terms", ())
    return Colocated(actor, engines, sync, gate, prefetched=[OPTIMIZER] if OPTIMIZER in beside_log_probs else [])


@contextmanager
def _ahead(config: RunConfig, run_dir: RunDir, data_fingerprint: str) -> Iterator[Ahead | None]:
    """What generation ahead of training needs beside engines and prompts; None where each group is trained on at once.
    The spool is empty afterwards, however the run ends.

    Raises DataError where the file of lost engines is damaged.
    """
    schedule = schedule_of(config)
    if schedule is None:
        yield None
        return
    lost = LostEngines(run_dir.lost_engines, run_dir.check_lock)
    suspects = lost.suspects()
    token_routes = route_bytes(config, load_model_spec(config.model.path))
    with ExitStack() as afterwards, closing(GroupWriter(config.cluster.step_timeout_s, token_routes)) as writer:
        spool = Spool(run_dir.spool, writer)
        afterwards.callback(_close_spool, spool, run_dir)  # once nobody writes
        yield Ahead(schedule, made_by(config, data_fingerprint), spool, lost, suspects)


def _close_spool(spool: Spool, run_dir: RunDir) -> None:
    """Removes the files, unless the directory is another process's by now, and so are they."""
    with suppress(LostLock, OSError):
        run_dir.check_lock()
        spool.close()


def _generation(
    config: RunConfig, responder: Responder, stream: PromptStream, state: TrainState, ahead: Ahead | None
) -> Generation:
    if ahead is None:
        return InTurn(config, responder, stream)
    return GenerationAhead(config, responder, stream, state, ahead)


def _run_info(config: RunConfig) -> RunInfo:
    trainer = config.trainer
    return RunInfo(
        trainer.project_name, trainer.experiment_name, config.model_dump(mode="json"), trainer.logger_timeout_s
    )


def _with_total(config: RunConfig, total: int) -> RunConfig:
    """The length in steps is known to everybody, the learning-rate schedule included, however it was given."""
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"total_training_steps": total})})


def prompt_parameters(config: RunConfig) -> PromptParameters:
    """How rows become prompts."""
    data = config.data
    return PromptParameters(
        data.prompt_key, data.max_prompt_length, data.filter_overlong_prompts, data.truncation, data.max_bad_row_share,
        data.apply_chat_template_kwargs, data.enable_thinking, data.drop_duplicates, data.reward_fn_key,
    )  # fmt: skip


def load_training(config: RunConfig, tokenizer: Any) -> PromptStream:
    """The training prompts in their order, a sample of `data.train_max_samples` where that is set. Raises DataError."""
    data, seed = config.data, config.trainer.seed
    usable = PromptDataset.load(data.train_files, tokenizer, prompt_parameters(config))
    prompts = usable.sample(data.train_max_samples, seed if data.shuffle else None)
    print(f"training prompts: {_read_and_taken(usable, prompts)}")
    return PromptStream(prompts, data.prompts_at_a_time, seed, data.shuffle, prompts.sizes, data.train_weights)


def load_validation(config: RunConfig, tokenizer: Any) -> PromptDataset | None:
    """The held-out prompts of all files, a sample of `data.val_max_samples` where that is set; None where no file is
    given.

    The sample is the same whatever `trainer.seed` is: runs of different seeds are compared on the same prompts. Raises
    DataError.
    """
    data = config.data
    if not data.val_files:
        return None
    usable = PromptDataset.load(data.val_files, tokenizer, prompt_parameters(config), files_apart=True)
    prompts = usable.sample(data.val_max_samples, VALIDATION_SAMPLE)
    print(f"validation prompts: {_read_and_taken(usable, prompts)}")
    return prompts


def _read_and_taken(usable: PromptDataset, taken: PromptDataset) -> str:
    return str(usable.report) if taken is usable else f"{len(taken)} of {len(usable)}; {usable.report}"


def reward_spec(config: RunConfig, data_sources: Iterable[str] = ()) -> RewardSpec:
    """Which function scores. Raises ConfigError where `auto` knows none for one of the data sources."""
    reward, custom = config.reward, config.reward.custom_reward_function
    shared = {
        "bonus_rules": reward.bonus_rules,
        "max_memory_gib": reward.max_memory_gib,
        "data_sources": tuple(sorted(data_sources)),
    }
    if custom is None:
        spec = RewardSpec(reward.function, **shared)
    else:
        spec = RewardSpec(
            path=str(Path(custom.path).resolve()), name=custom.name, kwargs=custom.reward_kwargs, **shared
        )
    check_data_sources(spec, data_sources)
    return spec
