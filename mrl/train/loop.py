"""The algorithm, on one screen: one step, its phases named as in the metrics (timing_s/PHASE).

    phase            takes                              gives                                 written in
    ------------------------------------------------------------------------------------------------------------
    gen, reward      prompts, engines, reward pool      Rollouts: samples, rewards            generation.py, rollouts.py
       |  ^__________ further prompts, until the batch is full
       v
    old_log_prob     samples, actor                     TrainedStep: rows on ranks, log-probs update.py (not on policy)
    ref              the step, reference model          its log-probs, on the ranks           update.py
    adv              the step, rewards                  masks, weights, advantages, there     update.py
       |
       |   until here nothing is changed and a signal ends the step; from here it runs to its end
       v
    update_actor     the step                           new weights in the actor's ranks      update.py
    settle           what engines have under way        nothing that the sync would disturb   generation.py
    reshard          actor, engines                     the same weights in every engine      cluster/weight_sync.py
    testing          held-out prompts, engines          validation metrics                    validation.py
    save_checkpoint  actor, state                       checkpoints/step-N, written beside    saving.py

Between them stand the hand-overs of placement.py, where engines and actor take turns on the same devices. Where
generation runs ahead of training (trainer.schedule) engines work beside all of it up to `settle`: `gen` is then a wait
for what they have (ahead.py).

An example, parallel_configs/tiny-moe/cpu.yaml: 64 prompts x 8 responses of up to 4 tokens are 512 samples, 512 rows of
columns (data/samples.py); mini-batches of 16 prompts make 4 updates of 128 rows each.

Large things stay where they are: weights in ranks and engines, responses in the object stores of the engines' nodes
until a rank fetches those that it trains on. The driver holds prompts, numbers a response, references and metrics. What
a run consists of stands in run.py.
"""

from mrl.algo.rows import RowValues
from mrl.cluster.process_logs import processes_of
from mrl.cluster.trained_step import TrainedStep
from mrl.errors import DataError, EnvironmentFault, Interrupted, MrlError
from mrl.record.metrics import PhaseTimer
from mrl.train.reporting import memory_metrics, mfu_metrics, sample_metrics, time_metrics
from mrl.train.rollouts import Rollouts
from mrl.train.run import Run
from mrl.train.shown_rows import record_shown_rows
from mrl.train.update import advantages, corrections, old_log_probs, update
from mrl.train.validation import validate

RANKS_FREE_S = 30.0  # for ranks to end what they are at once the run ends


def train(run: Run) -> None:
    """Trains until the last step. Whatever ends it before in good order, what is whole on the ranks is saved."""
    try:
        run.placement.begin(run.state.step)
        if run.state.step == 0 and run.config.trainer.val_before_train:
            run.record.write(0, held_out_metrics(run) | memory_metrics(run.machines))
        run.generation.begin()
        while run.state.step < run.total_steps:
            train_step(run)
    except (Interrupted, DataError, EnvironmentFault) as error:  # weights that a NumericAbort is about are not kept
        save_whole(run, error)
        raise
    run.saver.save_last(run.state, run.line)


def save_whole(run: Run, error: MrlError) -> None:
    """Leaves a checkpoint of the newest weights, unless an update of them was under way or a rank is what was lost.

    Raises EnvironmentFault where the disk takes none.
    """
    lost = processes_of(error)
    if not run.is_whole or any(name.startswith("rank ") for name in lost):
        return
    if lost:
        run.placement.give_up_engines()
    if not run.actor.are_free(RANKS_FREE_S):
        print(f"error: step {run.state.step} is not saved: the ranks still wait for what is lost", flush=True)
        return
    try:
        run.saver.save_last(run.generation.given_up(run.state), run.line)
    except Interrupted as another:
        print(f"error: step {run.state.step} is not saved: {another}", flush=True)


def train_step(run: Run) -> None:
    """One step. A signal may end it until `update`, before which nothing is changed; from there it runs to its end."""
    timer, config, step = PhaseTimer(), run.config, run.state.step + 1
    with timer("step"):
        with timer("gen"):
            run.placement.to_generation()
        rollouts = run.generation.take(run.state, timer)
        with timer("record"):
            run.run_dir.check_lock()
            run.sample_writer.write(step, rollouts.samples, rollouts.results)  # goes on beside what follows
        trained, corrected, metrics = weigh_samples(run, timer, step, rollouts)
        run.stop.hold()
        with timer("switch"):
            run.placement.to_update()
        run.is_whole = False
        with timer("update_actor"):
            metrics |= update(trained, corrected)
        run.state = run.state.advanced(rollouts.cursor)
        run.is_whole = True
        metrics = sample_metrics(config.data, run.state.cursor.epoch, rollouts) | rollouts.metrics | metrics
        run.line = metrics
        save_metrics, saves = run.saver.finished(), due(config.trainer.save_freq, step, run.total_steps)
        if saves:
            with timer("save_checkpoint"):
                save_metrics |= run.saver.take(step)  # the ranks have what is saved on their devices
        run.generation.settle(timer, saves)
        with timer("reshard"):
            metrics |= run.placement.to_engines(step)
        metrics |= run.placement.seconds()
        if due(config.trainer.test_freq, step, run.total_steps):
            with timer("testing"):
                metrics |= held_out_metrics(run)
        metrics |= save_metrics
        run.state = run.generation.advanced(run.state)
        with timer("record"):
            metrics |= memory_metrics(run.machines)
        if saves:
            with timer("save_checkpoint"):
                metrics |= run.saver.write(run.state, metrics)
    metrics |= {"training/failed_saves": float(run.saver.failed_saves)}
    metrics |= {"training/failed_sample_files": float(run.sample_writer.failed)}
    metrics |= time_metrics(config, timer, rollouts)
    seconds = {"update": metrics["perf/update_s"], "step": timer.seconds["step"]}
    metrics |= mfu_metrics(config.algorithm, run.actor.model, rollouts.samples.rows, run.peak, seconds)
    run.line = metrics
    run.record.write(step, metrics)
    run.stop.release()


def weigh_samples(
    run: Run, timer: PhaseTimer, step: int, rollouts: Rollouts
) -> tuple[TrainedStep, RowValues, dict[str, float]]:
    """What an update needs of the samples, on the ranks: log-probs of the policies, rejections and weights, advantages.

    Returns the step there, the corrections a row, and metrics. Changes nothing that lasts.
    """
    config, algorithm = run.config, run.config.algorithm
    if algorithm.scores_before_update:
        with timer("switch"):
            run.placement.to_log_probs()
    with timer("adv" if algorithm.on_policy else "old_log_prob"):
        trained = TrainedStep(run.actor, rollouts.samples)
        metrics = old_log_probs(config, trained)
        if config.record.trainer_log_probs:
            run.sample_writer.write_differences(step, trained)
    with timer("record"):
        record_shown_rows(run.run_dir.path, step, trained, rollouts)
    if algorithm.needs_reference:
        with timer("ref"):
            trained.ref_log_probs()
    with timer("adv"):
        corrected, correction_metrics = corrections(algorithm, trained)
        return trained, corrected, metrics | correction_metrics | advantages(config, trained, rollouts, corrected)


def due(freq: int, step: int, total_steps: int) -> bool:
    """Whether something done every `freq` steps is done after `step`, the last included; never for `freq` below 1."""
    return freq > 0 and (step % freq == 0 or step == total_steps)


def held_out_metrics(run: Run) -> dict[str, float]:
    """Metrics of all held-out sets under the weights that the engines hold; nothing without held-out prompts."""
    if run.val_prompts is None:
        return {}
    run.placement.to_generation()
    return validate(run.config, run.responder, run.val_prompts, run.state.step, run.run_dir.validation, run.record)
