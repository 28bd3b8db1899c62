"""Restarts lost ranks inside the run, which continues from its newest intact checkpoint.

    a rank is lost        all ranks are ended, and generation and the record of metrics closed
    engines               give up requests and version, and stay; where one does not answer they are started again, too
    run directory         is brought back to checkpoint V as by a resume, to the start of the run where there is none
    new ranks             load V, bring it to the engines, which is proven as ever, and the loop goes on with step V+1

The same happens if lost engines can no longer get the weights with which they must finish responses. This occurs only
in order, ahead of training.

Numbers that must not reach the optimizer are not such a loss. A restart would compute them again, bit by bit.
"""

from mrl.errors import Interrupted
from mrl.train.assemble import Run
from mrl.train.loop import train


def train_on(run: Run) -> Run:
    """Trains until the last step, and restarts lost ranks. Returns the run as it ended.

    Raises the errors of `train`.
    """
    while True:
        try:
            train(run)
            return run
        except Interrupted as error:
            run = run.start_again(error, run.state.step)
