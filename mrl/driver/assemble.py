"""Builds a run in four steps, each from the results of earlier steps, and closes it in reverse order.

    step       takes                      gives                                      written in
    -------------------------------------------------------------------------------------------------------
    Data       model, data, reward        prompts, reward, number of steps           assemble_data.py
    Files      FilesOrder                 run directory, resume point, spool         assemble_files.py
    Processes  ProcessOrder, Files        engines, ranks, scorers, placement         assemble_processes.py
    Run        configuration, all three   saver, record, generation: what loop.py    here
                                          hands to its phases

An order says what a step needs of the configuration, and what follows from it. Of processes, ranks alone get all of it.
Nothing is written before Files, and nothing of an earlier run is changed before Run. So a refused start leaves
everything unchanged.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mrl.cluster.actor_group import ActorGroup
from mrl.cluster.hosts import Hosts, Peak
from mrl.cluster.process_logs import concerning, processes_of
from mrl.config.deployment import Deployment
from mrl.config.schedule_rules import schedule_of
from mrl.config.schema import RewardConfig, RunConfig
from mrl.data.batch import Prompt
from mrl.data.dataset import PromptDataset
from mrl.driver.advice import advisers
from mrl.driver.assemble_data import Data, check_least_scores, keep_images, names_of_images, read_data
from mrl.driver.assemble_files import Files, FilesOrder, at_newest_checkpoint, find_beginning, open_files, with_spool
from mrl.driver.assemble_processes import (
    Processes,
    ProcessOrder,
    first_sync_brings_all,
    restart_ranks,
    start_processes,
)
from mrl.driver.placement import Placement
from mrl.driver.preflight import RunInputs
from mrl.driver.reporting import AdvisedRecord, SpikeWatch
from mrl.driver.resume import generated_again, groups_again, rewind
from mrl.driver.sample_writer import SampleWriter
from mrl.driver.saving import SavedRun, Saver
from mrl.driver.stop_signals import StopFlag, grace_of_the_job
from mrl.driver.turn_images import TurnImages
from mrl.engine.requests import training_sampling
from mrl.errors import ConfigError, DamagedCheckpoint, EnvironmentFault, Interrupted, LostWeights
from mrl.generate.generation import Generation
from mrl.generate.generation_rules import GenerationRules
from mrl.generate.rollouts import Judge, Responder
from mrl.generate.spool import Spool
from mrl.generate.train_state import TrainState
from mrl.plan.run_plan import plan_text
from mrl.record.attempts import UnderWay, read_attempts, seconds_after
from mrl.record.loggers import RunInfo
from mrl.record.quarantine import ROW, Quarantine
from mrl.record.redact import without_secrets
from mrl.record.run_dir import RunDir, write_text
from mrl.record.sinks import make_sinks
from mrl.record.views import View

RESTART_WINDOW = 100  # finished steps to which trainer.restart_limit applies


@dataclass
class Run:
    """A run in progress. The loop passes its parts to phases, each of which gets only what it uses. Fields after `peak`
    change.
    """

    config: RunConfig
    run_dir: RunDir
    prompts: Sequence[Prompt]  # of the training data
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
    spool: Spool  # what a start that goes back finds of the step
    hosts: Hosts
    peak: Peak
    state: TrainState  # of the weights that the ranks hold
    truth_of: Callable[[int], Any] | None = None  # of a training prompt, by its id
    is_whole: bool = True  # false while an update changes the weights
    line: dict[str, float] = field(default_factory=dict)  # known metrics of the step that made the weights
    restarts: int = 0  # restarts of its ranks so far
    start_seconds: dict[str, float] = field(default_factory=dict)  # that the next line has of this start
    spikes: SpikeWatch = field(default_factory=SpikeWatch)
    start_again: Callable[[Interrupted, int], "Run"] | None = None  # used after ranks were lost


@contextmanager
def open_run(inputs: RunInputs, resume: bool, views: Mapping[str, View] | None = None) -> Iterator[Run]:
    """Opens a run up to its next step.

    `views`: views of its metrics, in addition to those of trainer.logger. If ranks find a checkpoint damaged, the run
    starts again from the one before. Raises an error of mrl.errors. The run directory is made after data, reward and
    cluster have been checked.
    """
    damaged: dict[Path, DamagedCheckpoint] = {}
    stop = StopFlag(grace_of_the_job())
    start = partial(_start, inputs, resume, damaged, views, stop)
    with ExitStack() as stack:
        while (run := _unless_damaged(start, resume, damaged, stack)) is None:
            stop.raise_if_set()
            print("the run starts again, without the damaged checkpoint", flush=True)
        yield run


def _unless_damaged(
    start: Callable[[ExitStack], Run], resume: bool, damaged: dict[Path, DamagedCheckpoint], stack: ExitStack
) -> Run | None:
    """Returns the run, which `stack` will close; None if its checkpoint is damaged. Then it adds it to `damaged`."""
    try:
        with ExitStack() as own:
            run = start(own)
            stack.push(own.pop_all())
            return run
    except DamagedCheckpoint as error:
        if not resume or error.folder in damaged:
            raise
        damaged[error.folder] = DamagedCheckpoint(*error.args)  # a new one: the old keeps all that the start had made
        return None


def _start(
    inputs: RunInputs,
    resume: bool,
    damaged: dict[Path, DamagedCheckpoint],
    views: Mapping[str, View] | None,
    stop: StopFlag,
    stack: ExitStack,
) -> Run:
    """Runs the four steps, from the newest checkpoint that is not in `damaged`."""
    given = inputs.config
    data = read_data(given.model, given.data, given.rollout, given.reward, given.trainer)
    check_least_scores(given.algorithm.adv_estimator, given.reward, data.stream.prompts.data_sources)
    config = _with_total_steps(given, data.total_steps)
    files_order = FilesOrder.of(config, inputs.model, data, inputs.resolved.to_record())
    beginning = find_beginning(stack, files_order, resume, damaged, stop)
    files = open_files(stack, beginning, resume, stop)
    keep_images(data.images, (data.stream.prompts, data.val_prompts), given.data, files.run_dir.images)
    order = ProcessOrder.of(config, inputs.model, data.reward, files.run_dir.logs)
    return _Starts(stack, order, data, files, damaged, views, stop).first()


def _with_total_steps(config: RunConfig, total_steps: int) -> RunConfig:
    """Returns the configuration with its length in steps: for learning rates, a resume, and where generation ends.

    Raises ConfigError for a run that trains only its critic. Rules check runs whose steps are configured.
    """
    if config.algorithm.needs_critic and config.trainer.warmup_steps >= total_steps:
        raise ConfigError(
            f"trainer.critic_warmup = {config.trainer.critic_warmup}: the run has {total_steps} steps, and the actor "
            "would never be trained"
        )
    trainer = config.trainer.model_copy(update={"total_training_steps": total_steps})
    return config.model_copy(update={"trainer": trainer})


class _Starts:
    """Starts the ranks of a run and everything that depends on them, and restarts these when ranks are lost.

        a rank is lost    all ranks are ended, and generation and the record of metrics closed
        engines           give up requests and version, and stay; if one does not answer, they are restarted too
        run directory     returns to checkpoint V as in a resume, or to the run's start if there is none
        new ranks         load V and bring it to the engines, which is verified; the loop continues with step V+1

    The same happens if lost engines can no longer get the weights with which they must finish responses. This occurs
    only in order, ahead of training.
    """

    def __init__(
        self,
        stack: ExitStack,
        order: ProcessOrder,
        data: Data,
        files: Files,
        damaged: dict[Path, DamagedCheckpoint],
        views: Mapping[str, View] | None,
        stop: StopFlag,
    ) -> None:
        self._config = order.ranks.config
        self._order = order
        self._data = data
        self._files = files
        self._damaged = damaged
        self._views = views
        self._stop = stop
        self._kept = stack.enter_context(ExitStack())  # engines and scorers
        self._own = stack.enter_context(ExitStack())  # ranks, and everything that depends on them
        self._processes: Processes | None = None
        self._has_engines = False  # false while all engines are restarted too
        self._run_before: Run | None = None
        spent_at = [step for each in read_attempts(files.run_dir.path) for step in each.restarted_at]
        limit = self._config.trainer.restart_limit
        for_engines = limit if self._config.rollout.restart_limit else 0
        self._budget = RestartBudget(limit, tuple(spent_at), files.notes.restarted, for_engines)

    def first(self) -> Run:
        """Returns the run as it was opened."""
        files = with_spool(self._own, self._files)
        self._processes = start_processes(self._kept, self._own, self._order, files)
        self._has_engines = True
        return self._run(files)

    def again(self, error: Interrupted, step: int) -> Run:
        """Returns the run from its newest intact checkpoint, after ranks were lost. `step`: the last finished one.

        Raises `error` if ranks may not be restarted, and Interrupted if no node has room for them. Errors of a start
        are raised as well.
        """
        while True:
            self._budget.spend(error, step)
            print(f"{error}\nafter step {step} the ranks are started again", flush=True)
            self._processes.actor.stop()  # first, because nothing that engines or the disk wait for will come any more
            try:
                return self._once_more()
            except Interrupted as another:
                error = another
            except DamagedCheckpoint:  # every checkpoint
                raise
            except EnvironmentFault as fault:  # the run can continue later, when there is room for its ranks
                text = f"{error}; and ranks could not be started again: {fault}"
                raise concerning(Interrupted(text), *processes_of(error)) from fault

    def _once_more(self) -> Run:
        while True:
            self._end_ranks()
            self._stop.deliver_signals()
            try:
                return self._run(self._beside_engines() or self._all_anew())
            except DamagedCheckpoint as damage:
                if damage.folder in self._damaged:
                    raise
                self._damaged[damage.folder] = DamagedCheckpoint(*damage.args)

    def _end_ranks(self) -> None:
        """Ends ranks and everything that depends on them. Errors of lost ones are printed, and do not end the run."""
        try:
            self._own.close()
        except Interrupted as error:
            print(f"{error}; this went with the ranks", flush=True)

    def _beside_engines(self) -> Files | None:
        """Starts ranks beside the present engines. Returns the files from which the run continues.

        Returns None if engines must be restarted too: one does not answer, or weights take the slow path.
        """
        if not self._has_engines or not first_sync_brings_all(self._order.reshard):
            return None
        files = with_spool(self._own, at_newest_checkpoint(self._files))
        try:
            self._processes = restart_ranks(self._own, self._order, files, self._processes)
            return files
        except Interrupted as error:
            if any(name.startswith("rank ") for name in processes_of(error)) or self._stop.signal is not None:
                raise
            self._processes.engines.fleet.charge(error)
            print(f"{error}; engines are started again, too", flush=True)
        self._end_ranks()
        return None

    def _all_anew(self) -> Files:
        """Starts ranks, and all engines except those that were given up. Returns the files from which the run
        continues.
        """
        self._has_engines = False
        self._kept.close()
        files = with_spool(self._own, at_newest_checkpoint(self._files))
        before = self._processes.engines
        self._processes = start_processes(self._kept, self._own, self._order, files, before)
        self._has_engines = True
        return files

    def _run(self, files: Files) -> Run:
        before = self._run_before
        peak = None
        if before is not None:
            peak = before.peak
        run = _ready_run(self._own, self._config, self._data, files, self._processes, self._views, self._stop, peak)
        if before is not None:
            run.saver.count_on(before.saver)
            run.sample_writer.failed = before.sample_writer.failed
            run.spikes = before.spikes
        self._run_before = run
        run.start_again = self.again
        run.restarts = self._budget.spent
        self._files.notes.ready()
        return run


def _images_of_turns(config: RunConfig, run_dir: RunDir, data: Data) -> TurnImages | None:
    """Returns the images of tools and agents; None for a run that has none."""
    if config.model.vision is None or config.rollout.turns is None:
        return None
    of_data = names_of_images((data.stream.prompts, data.val_prompts))
    # a step trains on responses begun so many steps before; while it writes samples, the next one is under way
    return TurnImages(run_dir.path, of_data, steps=schedule_of(config).max_staleness + 2)


def _ready_run(
    stack: ExitStack,
    config: RunConfig,
    data: Data,
    files: Files,
    processes: Processes,
    views: Mapping[str, View] | None,
    stop: StopFlag,
    peak: Peak | None,
) -> Run:
    """Takes the last step: makes the writers beside the loop, which `stack` closes before processes end.

    `peak`: the devices' peak FLOP/s, if known.
    """
    beginning = files.beginning
    run_dir = files.run_dir
    state = files.state
    actor = processes.actor
    engines = processes.engines
    identity = beginning.order.identity.going_on(beginning.point)
    saved = SavedRun(identity, config.actor.layout, data.fingerprint, beginning.order.token_routes)
    saver = Saver(config.trainer, saved, run_dir.checkpoints, processes.placement, state.step, run_dir.check_lock)
    saver.tell_saved = files.spool.saved
    stack.callback(saver.close)
    sample_writer = SampleWriter(
        run_dir.samples,
        config.cluster.step_timeout_s,
        config.record,
        config.model.vision is not None,
        _images_of_turns(config, run_dir, data),
    )
    stack.callback(sample_writer.close)
    hosts = Hosts(Deployment.of(config), actor, engines)
    peak = peak or hosts.peak()
    _go_on(files, data)
    record = _record(config, files, views)
    stack.callback(record.close)
    responder = _responder(stack, config.reward, files, processes, record)
    rules = _generation_rules(config, files)
    generation = stack.enter_context(closing(Generation(rules, responder, data.stream, state, files.left)))
    return Run(
        config=config,
        run_dir=run_dir,
        prompts=data.stream.prompts,
        val_prompts=data.val_prompts,
        truth_of=data.stream.prompts.ground_truth,
        total_steps=data.total_steps,
        stop=stop,
        record=record,
        responder=responder,
        actor=actor,
        placement=processes.placement,
        saver=saver,
        sample_writer=sample_writer,
        generation=generation,
        spool=files.spool,
        hosts=hosts,
        peak=peak,
        state=state,
    )


def _responder(
    stack: ExitStack, reward: RewardConfig, files: Files, processes: Processes, record: AdvisedRecord
) -> Responder:
    """Returns what answers and scores prompts. Scorers outlive lost ranks, so questions go with `stack`."""
    rewards = processes.scorers.for_another()
    stack.callback(rewards.withdraw_all)
    return Responder(processes.engines, rewards, reward, record, files.poll, processes.placement.mend)


def _go_on(files: Files, data: Data) -> None:
    """Brings the run directory to the step from which the run continues. Nothing can refuse after this change."""
    run_dir = files.run_dir
    beginning = files.beginning
    schedule = beginning.order.identity.schedule
    left = len(files.left) * schedule.responses
    if left:
        print(
            f"{left} responses by the weights of step {files.state.step} are there, and not generated again", flush=True
        )
    files.notes.generated_again(generated_again(schedule, run_dir, beginning.point, left))
    if beginning.point is not None:
        files.notes.rewound(files.state.step, seconds_after(run_dir.path, files.state.step))
    rewind(run_dir, beginning.point)
    if files.state.kl_coef is not None:
        print(
            f"the KL in the reward goes on with its checkpoint's weight of {files.state.kl_coef:g}; "
            "algorithm.kl_ctrl.kl_coef is that of a first step",
            flush=True,
        )
    run_dir.write_config(beginning.order.config_yaml)
    write_text(run_dir.plan, plan_text(beginning.plan))
    aside = Quarantine(run_dir.path, run_dir.check_lock)
    aside.rewind(files.state.step)
    aside.add(ROW, ({"file": each.file, "row": each.row, "why": each.reason} for each in data.bad_rows))


def _record(config: RunConfig, files: Files, views: Mapping[str, View] | None) -> AdvisedRecord:
    trainer = config.trainer
    run_dir = files.run_dir
    info = RunInfo(
        trainer.project_name,
        trainer.experiment_name,
        without_secrets(config.model_dump(mode="json")),
        trainer.logger_timeout_s,
    )
    sinks = make_sinks(trainer.logger, run_dir, trainer.total_training_steps, info, views)
    advice = advisers(config.algorithm, config.rollout, config.cluster.device, config.updates_per_step)
    return AdvisedRecord(sinks, advice, UnderWay(run_dir.path, files.state.step, run_dir.check_lock))


def _generation_rules(config: RunConfig, files: Files) -> GenerationRules:
    order = files.beginning.order
    return GenerationRules(
        order.identity.schedule,
        Judge(config.algorithm, config.reward, config.data.max_response_length),
        training_sampling(config.rollout, config.data, config.actor, config.model.path),
        config.trainer.seed,
        files.spool,
        files.lost,
        files.suspects,
        order.sources,
        groups_again(order.identity.schedule, files.notes),
    )


class RestartBudget:
    """The remaining restarts of ranks. A new start of the whole run restores none."""

    def __init__(
        self, limit: int, spent_at: tuple[int, ...], note: Callable[[int, str], None], for_engines: int = 0
    ) -> None:
        """`spent_at`: finished steps at each restart so far.

        `note`: writes such a step and the reason. `for_engines`: the limit of restarts because of lost engines.
        """
        self._limit = limit
        self._for_engines = for_engines
        self._spent_at = list(spent_at)
        self._note = note

    @property
    def spent(self) -> int:
        """Number of restarts of the run so far."""
        return len(self._spent_at)

    def spend(self, error: Interrupted, step: int) -> None:
        """Counts one restart after `step`.

        Raises `error` if a return to a checkpoint would not help, or no restart is left.
        """
        lost = processes_of(error)
        of_ranks = bool(lost) and all(name.startswith("rank ") for name in lost)
        limit = self._for_engines if isinstance(error, LostWeights) else self._limit if of_ranks else 0
        if not limit:
            raise error
        recent = [at for at in self._spent_at if at > step - RESTART_WINDOW]
        if len(recent) >= limit:
            again = f"ranks were started again {len(recent)} times in {RESTART_WINDOW} steps (trainer.restart_limit)"
            raise concerning(Interrupted(f"{error}; {again}"), *lost) from error
        self._spent_at.append(step)
        self._note(step, str(error))
