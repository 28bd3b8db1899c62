"""The algorithm: one step, `train_step`, its phases named as in the metrics (timing_s/PHASE).

    phase            takes                              gives                                 written in
    ------------------------------------------------------------------------------------------------------------
    gen, reward      prompts, engines, reward pool      Rollouts: samples, rewards            generation.py
       |  ^__________ further prompts, until the batch is full
       v
    teacher          samples, teacher                   its log-probs, on the ranks           rank/second_rows.py
    values           samples, critic                    values of tokens, on the ranks        rank/second_rows.py
    old_log_prob     samples, actor                     log-probs, on the ranks               rank/rank_step.py
    ref              the step, reference model          its log-probs, on the ranks           rank/rank_step.py
    adv              the step, rewards                  masks, weights, advantages, there     rank/rank_step.py
       |
       |   until here nothing is changed and a signal ends the step; from here it runs to its end
       v
    update_critic    the step                           new weights of the critic             step_batch.py
    update_actor     the step                           new weights in the actor's ranks      step_batch.py
    save_checkpoint  actor                              a copy in host memory, if due         saving.py
    settle           what engines have under way        nothing that the sync would disturb   generation.py (drain)
    reshard          actor, engines                     the same weights in every engine      cluster/weight_sync.py
    testing          validation prompts, engines        validation metrics                    validation.py
    save_checkpoint  that copy, state                   checkpoints/step-N, written beside    saving.py

Between them are the hand-overs of placement.py, if engines and actor take turns on the same devices. Generation is a
thread beside the loop, and `gen` is the wait for its batch. If it runs ahead of training (trainer.schedule), engines
work during the whole step up to `settle`. In the synchronous schedule they work from the sync on.

Example: parallel_configs/tiny-moe/cpu.yaml. 64 prompts x 8 responses of up to 4 tokens are 512 samples, which are rows
of columns (data/samples.py). Mini-batches of 16 prompts make 4 updates of 128 rows each.

Large data stays in place. Weights are in ranks and engines. Responses are in the object stores of the engines' nodes
until a rank fetches those that it trains on. The driver holds prompts, a few numbers for each response, references and
metrics. assemble.py lists the parts of a run.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import partial

from mrl.cluster.job import GRACE
from mrl.cluster.process_logs import processes_of
from mrl.config.deployment import Deployment
from mrl.config.schema import RunConfig
from mrl.data.order import DataCursor
from mrl.driver.agreement import compare
from mrl.driver.assemble import Run
from mrl.driver.reporting import (
    memory_metrics,
    mfu_metrics,
    note_warning,
    record_shown_rows,
    sample_metrics,
    set_failures_aside,
    time_metrics,
)
from mrl.driver.step_batch import StepBatch, check_routed
from mrl.driver.validation import ValidationSettings, answer_and_score, record_validation
from mrl.errors import DataError, EnvironmentFault, Interrupted, LostWeights, MrlError
from mrl.generate.rollouts import Rollouts, compared, metric_values
from mrl.rank.rank_step import CRITIC, FETCHING, LOG_PROBS, REFERENCE, TEACHER, WEIGHING
from mrl.record.metrics import StepLine

RANKS_FREE_S = 30.0  # for ranks to finish their work after the run ends, in addition to a transfer to a lost process


def train_on(run: Run) -> Run:
    """Trains until the last step, and restarts lost ranks. Returns the run as it ended.

    Raises the errors of `train`. Numbers that must not reach the optimizer restart nothing. A restart would compute
    them again, bit by bit.
    """
    while True:
        try:
            train(run)
            return run
        except Interrupted as error:
            run = run.start_again(error, run.state.step)


def train(run: Run) -> None:
    """Trains until the last step, or only validates the weights of the start (trainer.val_only).

    If the run ends early without damage, it saves what is complete on the ranks.
    """
    try:
        run.placement.begin(run.state.step)
        compare_with_engines(run)
        trainer = run.config.trainer
        if trainer.val_before_train and (trainer.val_only or run.state.step == 0):
            run.record.write(run.state.step, validation_metrics(run) | memory_metrics(run.hosts))
        if trainer.val_only:
            run.sample_writer.finish()
            return
        run.generation.begin()
        while run.state.step < run.total_steps:
            train_step(run)
        run.sample_writer.finish()
    except (Interrupted, DataError, EnvironmentFault) as error:  # not NumericAbort: its weights must not be saved
        save_whole(run, error)
        raise
    run.saver.save_last(run.state, run.line)
    run.spool.ended()


def compare_with_engines(run: Run) -> None:
    """Compares the engines' log-probs with the ranks', unless no step is left. The next line has its seconds."""
    if run.state.step < run.total_steps:
        parts = (run.config, run.prompts, run.responder, run.actor, run.placement, run.state.step)
        run.start_seconds = compare(*parts)


def save_whole(run: Run, error: MrlError) -> None:
    """Saves a checkpoint of the newest weights if that is possible.

    It is impossible during an update of the weights, or if a rank was lost. It is skipped if the run would not
    repeat bit by bit from there. It is also skipped if the last save took longer than a signal's grace. What prevents
    it is printed, because `error` is what ended the run.
    """
    lost = processes_of(error)
    if not run.is_whole or any(name.startswith("rank ") for name in lost):
        return
    if isinstance(error, LostWeights) and run.config.trainer.deterministic:
        return
    left_s = run.stop.left_s()
    if left_s < run.saver.last_s and run.saver.saved_step != run.state.step:
        took = f"the last save took {run.saver.last_s:.1f} s, and {left_s:.1f} s are left of the grace ({GRACE})"
        print(f"error: step {run.state.step} is not saved: {took}", flush=True)
        return
    if lost:
        run.placement.give_up_engines()
    if not run.actor.are_free(RANKS_FREE_S + run.config.reshard.timeout_s):
        print(f"error: step {run.state.step} is not saved: the ranks still wait for what is lost", flush=True)
        return
    try:
        with suppress(Interrupted):  # lost samples are no reason to lose the weights
            run.sample_writer.finish()
        run.saver.save_last(run.generation.given_up(run.state), run.line)
    except (Interrupted, EnvironmentFault) as another:
        print(f"error: step {run.state.step} is not saved: {another}", flush=True)


def train_step(run: Run) -> None:
    """Runs one step. A signal may end it before `update`, as nothing has changed. From there it runs to its end."""
    step = run.state.step + 1
    saves = due(run.config.trainer.save_freq, step, run.total_steps)
    line = StepLine()
    with line.phase("step"):
        rollouts = next_rollouts(run, line, step)
        begin_profile(run, line, step)
        trained = weigh_samples(run, line, step, rollouts)
        with line.phase("gen"):
            run.generation.before_update()
        run.stop.defer_signals()
        update_actor(run, line, trained, rollouts.cursor)
        end_profile(run, line, step)
        run.line = line.metrics
        line.add(run.saver.finished())
        if saves:
            copy_checkpoint(run, line, step)
        run.generation.drain(line.phase, saves)
        sync_engines(run, line, step)
        if due(run.config.trainer.test_freq, step, run.total_steps):
            validate(run, line)
        run.state = run.generation.resume(run.state)
        with line.phase("record"):
            line.add(memory_metrics(run.hosts))
        if saves:
            write_checkpoint(run, line)
    end_line(run, line, rollouts)
    run.record.write(step, run.line)
    run.stop.deliver_signals()


def next_rollouts(run: Run, line: StepLine, step: int) -> Rollouts:
    """Waits for the step's samples and rewards. Begins to write them in the background, and sets failed ones aside."""
    with line.phase("gen"):
        run.placement.to_generation()
    rollouts = run.generation.next_batch(line.phase)
    with line.phase("record"):
        run.run_dir.check_lock()
        run.sample_writer.write(step, rollouts.samples, rollouts.results, run.truth_of)
        set_failures_aside(run.run_dir, step, rollouts)
    line.add(sample_metrics(run.config.data, rollouts.cursor.epoch, rollouts) | rollouts.metrics)
    return rollouts


def begin_profile(run: Run, line: StepLine, step: int) -> None:
    """Begins to record what ranks compute, if the step is one of record.profile.steps."""
    if step in run.config.record.profile.steps:
        with line.phase("record"):
            run.actor.call("begin_profile")


def end_profile(run: Run, line: StepLine, step: int) -> None:
    """Ends what `begin_profile` began. A trace that cannot be written is a warning, and the run goes on."""
    if step in run.config.record.profile.steps:
        with line.phase("record"):
            said = run.actor.call("end_profile", str((run.run_dir.profiles / f"step-{step}").resolve()))
        for why in filter(None, said):
            note_warning(run.run_dir, step, why)


def weigh_samples(run: Run, line: StepLine, step: int, rollouts: Rollouts) -> StepBatch:
    """Computes everything that an update needs besides the samples, on the ranks. Returns the step there.

    These are log-probs of the policies, rejections, weights and advantages. Changes nothing permanent.
    """
    config = run.config
    algorithm = run.config.algorithm
    if config.scores_before_update:
        with line.phase("switch"):
            run.placement.to_log_probs()
    rows = rollouts.samples.rows
    check_routed(config.actor, rows)
    first = "adv" if algorithm.on_policy else "old_log_prob"
    with line.phase(first):
        trained = StepBatch(run.actor, rollouts.samples, step)
    if config.distillation.enabled and trains_actor(run):
        with line.phase("teacher"):
            trained.score_by(TEACHER)
    if algorithm.needs_critic:
        with line.phase("values"):
            trained.score_by(CRITIC)
    scored = trained.score(
        rollouts.rewards,
        compared(rows.group_id, rollouts.results, config.compares_responses),
        {key: metric_values(key, rollouts.results, rollouts.rewards) for key in algorithm.gdpo_reward_keys},
        by_reference=algorithm.use_kl_in_reward or (algorithm.needs_reference and trains_actor(run)),
        kl_coef=run.state.kl_coef,
    )
    line.add(scored.metrics)
    phases = {FETCHING: first, LOG_PROBS: "old_log_prob", REFERENCE: "ref", WEIGHING: "adv"}
    for phase, seconds in scored.seconds.items():
        line.phase.add(phases[phase], seconds)
    with line.phase("record"):
        if scored.gaps is not None and config.record.trainer_log_probs:
            run.run_dir.check_lock()
            run.sample_writer.write_differences(step, trained)
        record_shown_rows(run.run_dir, step, trained, scored.gaps, rollouts)
    return trained


def update_actor(run: Run, line: StepLine, trained: StepBatch, cursor: DataCursor) -> None:
    """Updates the weights, and records that in the state: the next step begins at `cursor`.

    A critic is updated first, and alone before step trainer.critic_warmup.
    """
    if run.config.algorithm.needs_critic:
        run.is_whole = False
        with line.phase("update_critic"):
            line.add(trained.update_critic())
    if not trains_actor(run):
        line.add(trained.leave_actor())
    else:
        with line.phase("switch"):
            run.placement.to_update()
        run.is_whole = False
        with line.phase("update_actor"):
            note = partial(note_warning, run.run_dir)
            watch = partial(run.spikes.look, run.state.step + 1, run.config.actor.optim.clip_grad, note=note)
            line.add(trained.update(watch))
    run.state = run.state.advanced(cursor, next_kl_coef(run.config, line.metrics, len(trained.rows)))
    run.is_whole = True


def next_kl_coef(config: RunConfig, metrics: Mapping[str, float], samples: int) -> float | None:
    """Returns the weight of a KL in the next step's rewards; None where it is that of the configuration."""
    control = config.algorithm.kl_ctrl
    if control.type == "fixed":
        return None
    return control.next_coef(metrics["actor/kl_coef"], metrics["actor/reward_kl"], samples)


def trains_actor(run: Run) -> bool:
    """Tells whether the current step updates the actor, and not only a critic."""
    return run.state.step >= run.config.trainer.warmup_steps


def copy_checkpoint(run: Run, line: StepLine, step: int) -> None:
    """Copies the states to save while the ranks have them on their devices."""
    with line.phase("save_checkpoint"):
        line.add(run.saver.take(step))


def sync_engines(run: Run, line: StepLine, step: int) -> None:
    """Brings the new weights into all engines."""
    with line.phase("reshard"):
        line.add(run.placement.to_engines(step))
    line.add(run.placement.seconds() | run.responder.engines.fleet.metrics())


def validate(run: Run, line: StepLine) -> None:
    """Answers the validation prompts."""
    with line.phase("testing"):
        line.add(validation_metrics(run))


def write_checkpoint(run: Run, line: StepLine) -> None:
    """Begins to write the copy, with the state to continue from.

    The step's samples are on disk by then. So a start from this checkpoint after a kill does not generate them again.
    """
    with line.phase("save_checkpoint"):
        run.sample_writer.finish()
        line.add(run.saver.write(run.state, line.metrics))


def end_line(run: Run, line: StepLine, rollouts: Rollouts) -> None:
    """Adds metrics that are known only after a step: failed writes, restarts, times, and FLOPs relative to the devices'
    peak.
    """
    config = run.config
    seconds = {"update": line.metrics.get("perf/update_s", 0.0), "step": line.phase.seconds["step"]}
    line.add(failed_writes(run) | {"trainer/restarts": float(run.restarts)})
    line.add(run.start_seconds)
    run.start_seconds = {}
    line.add(time_metrics(config.trainer, Deployment.of(config).devices, line.phase, rollouts))
    teacher = run.actor.teacher and run.actor.teacher.model
    rows = rollouts.samples.rows
    line.add(mfu_metrics(config.algorithm, run.actor.model, rows, run.peak, seconds, teacher, config.epochs))


def failed_writes(run: Run) -> dict[str, float]:
    """Returns counts of checkpoints and response files that the disk has refused so far."""
    return {
        "training/failed_saves": float(run.saver.failed_saves),
        "training/failed_sample_files": float(run.sample_writer.failed),
    }


def due(freq: int, step: int, total_steps: int) -> bool:
    """Tells whether a task with period `freq` is due after `step`.

    It is also due after the last step, and never with `freq` below 1.
    """
    return freq > 0 and (step % freq == 0 or step == total_steps)


def validation_metrics(run: Run) -> dict[str, float]:
    """Returns metrics of all validation sets under the engines' weights; empty without validation prompts."""
    if run.val_prompts is None:
        return {}
    run.placement.to_generation()
    config = run.config
    step = run.state.step
    settings = ValidationSettings.of(config.rollout, config.data, config.model.path, config.trainer.seed)
    validation = answer_and_score(settings, run.responder, run.val_prompts)
    shown = config.trainer.log_val_generations
    record_validation(validation, run.responder, step, run.run_dir, shown, run.record)
    return validation.metrics
