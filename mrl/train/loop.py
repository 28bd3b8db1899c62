"""The algorithm: one step, `train_step`, its phases named as in the metrics (timing_s/PHASE).

    phase            takes                              gives                                 written in
    ------------------------------------------------------------------------------------------------------------
    gen, reward      prompts, engines, reward pool      Rollouts: samples, rewards            generation.py
       |  ^__________ further prompts, until the batch is full
       v
    old_log_prob     samples, actor                     StepBatch: rows on ranks, log-probs   update.py (not on policy)
    ref              the step, reference model          its log-probs, on the ranks           update.py
    teacher          the step, teacher                  its log-probs, on the ranks           flow/teacher_rows.py
    values           the step, critic                   values of tokens, on the ranks        update.py (with a critic)
    adv              the step, rewards                  masks, weights, advantages, there     update.py
       |
       |   until here nothing is changed and a signal ends the step; from here it runs to its end
       v
    update_critic    the step                           new weights of the critic             update.py (with a critic)
    update_actor     the step                           new weights in the actor's ranks      update.py
    settle           what engines have under way        nothing that the sync would disturb   generation.py (drain)
    reshard          actor, engines                     the same weights in every engine      cluster/weight_sync.py
    testing          held-out prompts, engines          validation metrics                    validation.py
    save_checkpoint  actor, state                       checkpoints/step-N, written beside    saving.py

Between them stand the hand-overs of placement.py, where engines and actor take turns on the same devices. Generation
is a thread beside the loop: `gen` is a wait for what it has. Where it runs ahead of training (trainer.schedule) engines
work beside all of the step up to `settle`, in the synchronous schedule from the sync on.

An example, parallel_configs/tiny-moe/cpu.yaml: 64 prompts x 8 responses of up to 4 tokens are 512 samples, 512 rows of
columns (data/samples.py); mini-batches of 16 prompts make 4 updates of 128 rows each.

Large things stay where they are: weights in ranks and engines, responses in the object stores of the engines' nodes
until a rank fetches those that it trains on. The driver holds prompts, numbers a response, references and metrics. What
a run consists of stands in assemble.py.
"""

from contextlib import suppress
from functools import partial

from mrl.algo.rows import RowValues
from mrl.cluster.job import GRACE
from mrl.config.places import Deployment
from mrl.data.order import DataCursor
from mrl.errors import DataError, EnvironmentFault, Interrupted, LostWeights, MrlError
from mrl.flow.step_batch import StepBatch
from mrl.record.metrics import StepLine
from mrl.remote.process_logs import processes_of
from mrl.train.assemble import Run
from mrl.train.reporting import (
    memory_metrics,
    mfu_metrics,
    record_shown_rows,
    sample_metrics,
    set_failures_aside,
    time_metrics,
)
from mrl.train.rollouts import Rollouts, compared
from mrl.train.update import advantages, corrections, leave_actor, old_log_probs, update, update_critic
from mrl.train.validation import ValidationSettings, answer_and_score, record_validation

RANKS_FREE_S = 30.0  # for ranks to end what they are at once the run ends, beyond a transfer to what is lost


def train(run: Run) -> None:
    """Trains until the last step. Whatever ends it before in good order, what is whole on the ranks is saved."""
    try:
        run.placement.begin(run.state.step)
        if run.state.step == 0 and run.config.trainer.val_before_train:
            run.record.write(0, held_out_metrics(run) | memory_metrics(run.hosts))
        run.generation.begin()
        while run.state.step < run.total_steps:
            train_step(run)
    except (Interrupted, DataError, EnvironmentFault) as error:  # weights that a NumericAbort is about are not kept
        save_whole(run, error)
        raise
    try:
        run.sample_writer.finish()
    finally:
        run.saver.save_last(run.state, run.line)
    run.spool.ended()


def save_whole(run: Run, error: MrlError) -> None:
    """Leaves a checkpoint of the newest weights where that can be done.

    It cannot where an update of them was under way, or a rank is what was lost. Nor can it where the run would not
    repeat bit by bit from there. Nor can it where the grace of a signal is shorter than the last save took. Raises
    EnvironmentFault where the disk takes none.
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
        with suppress(Interrupted):  # samples that are lost are no reason to lose the weights
            run.sample_writer.finish()
        run.saver.save_last(run.generation.given_up(run.state), run.line)
    except Interrupted as another:
        print(f"error: step {run.state.step} is not saved: {another}", flush=True)


def train_step(run: Run) -> None:
    """One step. A signal may end it until `update`, before which nothing is changed; from there it runs to its end."""
    step = run.state.step + 1
    saves = due(run.config.trainer.save_freq, step, run.total_steps)
    line = StepLine()
    with line.phase("step"):
        rollouts = next_rollouts(run, line, step)
        trained, corrected = weigh_samples(run, line, step, rollouts)
        with line.phase("gen"):
            run.generation.before_update()
        run.stop.defer_signals()
        update_actor(run, line, trained, corrected, rollouts.cursor)
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
    """Waits for the step's samples and rewards. They begin to be written, beside what follows; failed ones are set
    aside.
    """
    with line.phase("gen"):
        run.placement.to_generation()
    rollouts = run.generation.next_batch(line.phase)
    with line.phase("record"):
        run.run_dir.check_lock()
        run.sample_writer.write(step, rollouts.samples, rollouts.results)
        set_failures_aside(run.run_dir, step, rollouts)
    line.add(sample_metrics(run.config.data, rollouts.cursor.epoch, rollouts) | rollouts.metrics)
    return rollouts


def weigh_samples(run: Run, line: StepLine, step: int, rollouts: Rollouts) -> tuple[StepBatch, RowValues]:
    """What an update needs of the samples, on the ranks: log-probs of the policies, rejections and weights, advantages.

    Returns the step there, and the corrections a row. Changes nothing that lasts.
    """
    config = run.config
    algorithm = run.config.algorithm
    if config.scores_before_update:
        with line.phase("switch"):
            run.placement.to_log_probs()
    with line.phase("adv" if algorithm.on_policy else "old_log_prob"):
        trained = StepBatch(run.actor, rollouts.samples)
        line.add(old_log_probs(config.actor, algorithm, trained))
        if config.record.trainer_log_probs:
            run.run_dir.check_lock()
            run.sample_writer.write_differences(step, trained)
    with line.phase("record"):
        record_shown_rows(run.run_dir, step, trained, rollouts)
    if algorithm.use_kl_in_reward or (algorithm.needs_reference and trains_actor(run)):
        with line.phase("ref"):
            trained.ref_log_probs()
    if config.distillation.enabled and trains_actor(run):
        with line.phase("teacher"):
            trained.teacher_log_probs(rollouts.samples)
    if algorithm.needs_critic:
        with line.phase("values"):
            trained.values(rollouts.samples)
    with line.phase("adv"):
        counted = compared(trained.rows.group_id, rollouts.results, algorithm.needs_critic)
        corrected, metrics = corrections(algorithm, trained, counted)
        line.add(metrics | advantages(algorithm, trained, rollouts, corrected))
    return trained, corrected


def update_actor(run: Run, line: StepLine, trained: StepBatch, corrected: RowValues, cursor: DataCursor) -> None:
    """Changes the weights, and says so in the state: the next step begins at `cursor`.

    Those of a critic first, and alone before step trainer.critic_warmup.
    """
    if run.config.algorithm.needs_critic:
        run.is_whole = False
        with line.phase("update_critic"):
            line.add(update_critic(trained, corrected))
    if not trains_actor(run):
        line.add(leave_actor(trained))
    else:
        with line.phase("switch"):
            run.placement.to_update()
        run.is_whole = False
        with line.phase("update_actor"):
            watch = partial(run.spikes.look, run.state.step + 1, run.config.actor.optim.clip_grad)
            line.add(update(trained, corrected, watch))
    run.state = run.state.advanced(cursor)
    run.is_whole = True


def trains_actor(run: Run) -> bool:
    """Whether the step under way updates the actor, and not a critic alone."""
    return run.state.step >= run.config.trainer.warmup_steps


def copy_checkpoint(run: Run, line: StepLine, step: int) -> None:
    """Copies what is saved while the ranks have it on their devices."""
    with line.phase("save_checkpoint"):
        line.add(run.saver.take(step))


def sync_engines(run: Run, line: StepLine, step: int) -> None:
    """Brings the new weights into all engines."""
    with line.phase("reshard"):
        line.add(run.placement.to_engines(step))
    line.add(run.placement.seconds() | run.responder.engines.fleet.metrics())


def validate(run: Run, line: StepLine) -> None:
    """Answers the held-out prompts."""
    with line.phase("testing"):
        line.add(held_out_metrics(run))


def write_checkpoint(run: Run, line: StepLine) -> None:
    """Begins to write what was copied, with the state to go on from. The step's samples are on disk by then: who starts
    from it after a kill does not make them again.
    """
    with line.phase("save_checkpoint"):
        run.sample_writer.finish()
        line.add(run.saver.write(run.state, line.metrics))


def end_line(run: Run, line: StepLine, rollouts: Rollouts) -> None:
    """Adds what is known once a step is over: failed writes, starts, times, its FLOPs over those of the devices."""
    config = run.config
    seconds = {"update": line.metrics.get("perf/update_s", 0.0), "step": line.phase.seconds["step"]}
    line.add(failed_writes(run) | {"trainer/restarts": float(run.restarts)})
    line.add(time_metrics(config.trainer, Deployment.of(config).devices, line.phase, rollouts))
    teacher = run.actor.teacher and run.actor.teacher.model
    line.add(mfu_metrics(config.algorithm, run.actor.model, rollouts.samples.rows, run.peak, seconds, teacher))


def failed_writes(run: Run) -> dict[str, float]:
    """Checkpoints and files of responses that the disk did not take so far."""
    return {
        "training/failed_saves": float(run.saver.failed_saves),
        "training/failed_sample_files": float(run.sample_writer.failed),
    }


def due(freq: int, step: int, total_steps: int) -> bool:
    """Whether something done every `freq` steps is done after `step`, the last included; never for `freq` below 1."""
    return freq > 0 and (step % freq == 0 or step == total_steps)


def held_out_metrics(run: Run) -> dict[str, float]:
    """Metrics of all held-out sets under the weights that the engines hold; nothing without held-out prompts."""
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
