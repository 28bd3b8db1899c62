"""A few responses of each step with the trainer's log-probs, for people to look at."""

from mrl.errors import MrlError, described
from mrl.flow.step_batch import StepBatch
from mrl.record.run_dir import RunDir
from mrl.record.shown_rows import extreme_rows, write_shown_rows
from mrl.train.rollouts import Rollouts


def record_shown_rows(run_dir: RunDir, step: int, trained: StepBatch, rollouts: Rollouts) -> None:
    """Writes log-probs of the best and the worst responses, and of those that differ most from generation's.

    Writes nothing on policy: then log-probs come with the update, and rows are gone with it. What fails in showing is
    printed and ends no run. What the run itself met is raised: a lost rank, a signal or a lost lock.
    """
    if trained.log_gaps is None:
        return
    try:
        scores = [result.score for result in rollouts.results]
        reasons = [result.reason for result in rollouts.results]
        kinds = extreme_rows(scores, trained.rows.group_id.tolist(), reasons, trained.log_gaps.tolist())
        of_rows = trained.old_log_probs_of(sorted(row for rows in kinds.values() for row in rows))
        ids = trained.rows.sample_id
        run_dir.check_lock()
        write_shown_rows(run_dir.path, step, {int(ids[row]): log_probs for row, log_probs in of_rows.items()})
    except MrlError:
        raise
    except Exception as error:
        print(f"note: the log-probs to look at of step {step} are not written: {described(error)}", flush=True)
