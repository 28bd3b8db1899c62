"""The algorithm, on one screen: generate, reward, old log-probs, advantages, update, sync, validate, save.

What each line does stands in phases.py, sampling.py, offpolicy.py, validation.py or saving.py, under the same name;
what a run consists of, in run.py.
"""

from mrl.errors import Interrupted
from mrl.record.metrics import PhaseTimer
from mrl.train import offpolicy, phases, sampling, saving, validation
from mrl.train.run import Run


def train(run: Run) -> None:
    """Trains until the last step. On a signal the state is saved and Interrupted raised."""
    try:
        if run.state.step > 0:
            phases.bring_engines_to(run, run.state.step)  # engines start from the weights that training started from
        elif run.config.trainer.val_before_train:
            phases.record(run, validation.validate(run))
        while run.state.step < run.total_steps:
            train_step(run)
        saving.finish(run)
    except Interrupted:
        if run.stop.signal is not None and not run.stop.held:
            saving.finish(run)  # weights and data position are those of the last finished step
        raise


def train_step(run: Run) -> None:
    """One step. Nothing is changed before `update`, so a signal may end it until then; from there on it runs to its end."""
    timer, config = PhaseTimer(), run.config.trainer
    with timer("step"):
        rollouts = sampling.gather(run, timer)  # phases "gen" and "reward", as often as it takes to fill the batch
        samples, results = rollouts.samples, rollouts.results
        phases.write_samples(run, samples, results)
        with timer("old_log_prob"):
            batch, seen = phases.with_old_log_probs(run, samples)
        if run.config.algorithm.needs_reference:
            with timer("ref"):
                batch = phases.with_ref_log_probs(run, batch)
        with timer("adv"):
            rewards = sampling.rewards_of(run.config, samples, results)
            penalties, penalised = phases.kl_penalties(run, batch)
            batch, corrected = offpolicy.corrected(run.config, batch, samples)
            parts = sampling.part_values(run.config.algorithm.gdpo_reward_keys, results, rewards)
            batch = phases.with_advantages(run, batch, samples, rewards, parts, penalties)
        run.stop.hold()
        with timer("update_actor"):
            updated = phases.update(run, batch)
        with timer("reshard"):
            synced = phases.sync_weights(run)
        run.state = run.state.advanced(rollouts.cursor)
        metrics = phases.step_metrics(run, batch, results, rewards) | rollouts.metrics | seen | corrected | penalised | updated | synced
        if phases.due(run, config.test_freq):
            with timer("testing"):
                metrics |= validation.validate(run)
        metrics |= saving.heard(run)  # of a save that training went on beside
        if phases.due(run, config.save_freq):
            with timer("save_checkpoint"):
                metrics |= saving.save(run, metrics)
    phases.record(run, metrics | {"training/failed_saves": float(run.failed_saves)}, timer, batch)
    run.stop.release()
