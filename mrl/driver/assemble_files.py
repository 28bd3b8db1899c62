"""The second step of assembling a run: finds where it begins, then makes its directory and the files in it.

`Beginning` is found by reading only. `open_files` needs one and is the first to write. So every earlier refusal leaves
no trace.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from mrl.checkpoint.disk_space import route_bytes
from mrl.checkpoint.step_folders import Newest
from mrl.cluster.prerequisites import check_object_stores
from mrl.cluster.ray_cluster import object_store_sizes, ray_cluster
from mrl.cluster.ray_folder import remove_own_folders
from mrl.config.deployment import Deployment
from mrl.config.schema import RunConfig, TrainerConfig
from mrl.config.schema_algorithm import KlControlConfig
from mrl.driver.assemble_data import Data
from mrl.driver.preflight import plug_ins, run_dir_path
from mrl.driver.resume import RunIdentity, resume_point, resumed_state
from mrl.driver.stop_signals import StopFlag, stop_on_signals
from mrl.engine.leftovers import remove_noted
from mrl.errors import DamagedCheckpoint
from mrl.generate.group_writer import GroupParts, GroupWriter
from mrl.generate.kept_groups import HasImages, read_kept, read_left
from mrl.generate.lost_engines import LostEngines
from mrl.generate.sampled_by import SampledBy, Sources, sources_of
from mrl.generate.spool import Spool
from mrl.generate.train_state import TrainState
from mrl.model import ModelSpec
from mrl.plan.run_plan import plan_again
from mrl.platforms.process_tree import end_descendants
from mrl.platforms.versions import installed_versions
from mrl.record.attempts import AttemptNotes, attempt
from mrl.record.run_dir import RunDir
from mrl.schedule.suspects import Suspects


@dataclass(frozen=True)
class FilesOrder:
    """What a run writes, and what a checkpoint that it continues from must agree with."""

    trainer: TrainerConfig
    deployment: Deployment
    identity: RunIdentity
    data_fingerprint: str
    token_routes: int  # bytes of one token's routes, in the form of samples
    config_yaml: str  # of this start; it replaces the previous one when nothing can refuse any more
    plan_for: Callable[[Path], dict[str, Any]]  # takes the file of an earlier plan
    plug_ins: Sequence[Mapping[str, str]]
    sources: Sources
    kl_control: KlControlConfig
    bring_images: Callable[..., bool] | None = None  # as ImageReader.bring; None: the run sees none

    @classmethod
    def of(cls, config: RunConfig, model: ModelSpec, data: Data, config_yaml: str) -> "FilesOrder":
        """Returns the order of a configuration with its length in steps.

        `config_yaml`: as it was given. Raises an error of mrl.errors for unreadable files of the model or the user.
        """
        validation_prompts = None
        if data.val_prompts:
            validation_prompts = len(data.val_prompts)
        found = plug_ins(config)
        return cls(
            config.trainer,
            Deployment.of(config),
            RunIdentity.of(config),
            data.fingerprint,
            route_bytes(config.actor, model),
            config_yaml,
            partial(plan_again, config, model, validation_prompts=validation_prompts),
            found,
            sources_of(config, data.fingerprint, data.rows_digest, found),
            config.algorithm.kl_ctrl,
            None if data.images is None else data.images.bring,
        )


@dataclass(frozen=True)
class Beginning:
    """The beginning of the run, on a cluster that is joined and large enough.

    Configuration, data, checkpoint and cluster have passed all checks.
    """

    order: FilesOrder
    folder: Path
    point: Newest | None  # None for a new run
    find_point: Callable[..., Newest | None]  # searches again; `resume`: whether the run's own newest is allowed
    plan: dict[str, Any]

    @property
    def checkpoint(self) -> Path | None:
        """The folder of the checkpoint that ranks load; None without a checkpoint."""
        if self.point is None:
            return None
        return self.point.path


def find_beginning(
    stack: ExitStack,
    order: FilesOrder,
    resume: bool,
    damaged: Mapping[Path, DamagedCheckpoint],
    stop: StopFlag,
) -> Beginning:
    """Joins Ray and then obeys signals, until `stack` ends both. `damaged`: checkpoints that are skipped.

    Raises an error of mrl.errors.
    """
    folder = run_dir_path(order.trainer, resume)
    find_point = partial(
        resume_point,
        order.trainer,
        order.identity,
        folder,
        damaged=damaged,
        data_fingerprint=order.data_fingerprint,
        resume=resume,
    )
    point = find_point()
    stack.enter_context(ray_cluster(order.deployment))
    plan = order.plan_for(RunDir(folder).plan)
    check_object_stores(plan["memory"]["host"]["object_store_bytes"], object_store_sizes(order.deployment))
    stop.leave_nothing = partial(leave_nothing, RunDir(folder).logs)
    stack.enter_context(stop_on_signals(stop))  # after Ray, whose own handlers abort the process
    return Beginning(order, folder, point, find_point, plan)


def leave_nothing(logs: Path) -> None:
    """Ends all processes of this run on this machine, and removes their remains."""
    end_descendants()
    remove_own_folders()
    remove_noted(logs)


@dataclass(frozen=True)
class Files:
    """The run directory, locked and with this attempt recorded, and the state from which the run continues."""

    run_dir: RunDir
    beginning: Beginning
    state: TrainState
    spool: Spool | None  # None before `with_spool`
    lost: LostEngines
    suspects: Suspects  # prompts that were running on lost engines
    poll: Callable[[], None]  # raises when the directory is lost or the run must stop
    notes: AttemptNotes
    # by number: groups that an earlier start finished with the weights of `state`; empty before `with_spool`
    left: Mapping[int, GroupParts] = field(default_factory=dict)


def open_files(stack: ExitStack, beginning: Beginning, resume: bool, stop: StopFlag) -> Files:
    """Takes the run directory. `stack` releases it last, after all writers. Raises an error of mrl.errors.

    If it had to wait for the directory, another process may have continued the run. So it searches the checkpoint
    again.
    """
    order = beginning.order
    run_dir = RunDir.open(beginning.folder, order.config_yaml, resume, stop.raise_if_set)
    stack.callback(run_dir.close)
    stack.callback(remove_noted, run_dir.logs)  # remains of killed engines, including those killed by this run
    beginning = replace(beginning, point=beginning.find_point())
    state = resumed_state(beginning.point, order.kl_control)
    noted = attempt(run_dir.path, state.step, installed_versions(), run_dir.check_lock, order.plug_ins)
    notes = stack.enter_context(noted)
    lost = LostEngines(run_dir.lost_engines, run_dir.check_lock)
    poll = partial(_poll, run_dir, stop)
    return Files(run_dir, beginning, state, None, lost, lost.suspects(), poll, notes)


def with_spool(own: ExitStack, files: Files) -> Files:
    """Returns the files with unfinished groups of the resume point, and groups that were finished with its weights.

    `own` releases these groups.
    """
    beginning = files.beginning
    order = beginning.order
    state = files.state
    origin = None
    if beginning.point is not None:
        origin = order.sources.by(state.step, state.weights)
    spool = own.enter_context(_spool(order, files.run_dir, origin))
    if state.step and "ahead" in beginning.point.manifest.trainer:
        written = beginning.point.manifest.trainer["ahead"]
        has_images = None
        if order.bring_images is not None:
            has_images = images_of_checkpoint(order.bring_images, beginning.checkpoint, files.run_dir.images)
        state = replace(state, ahead=read_kept(beginning.checkpoint, written, spool, origin, has_images))
    most = beginning.plan["memory"]["host"]["object_store_bytes"]
    if state.ahead is not None:
        most -= state.ahead.bytes(order.token_routes)
    return replace(files, spool=spool, state=state, left=read_left(spool, most, order.token_routes))


def images_of_checkpoint(bring: Callable[..., bool], checkpoint: Path, store: Path) -> HasImages:
    """Returns what brings images of a checkpoint's responses into `store`. Those of turns are in no data: they are in
    the directory of the run that saved it, which is another one's in a start by resume_path.
    """
    return partial(bring, source=RunDir(checkpoint.parents[1]).images, store=store)


def at_newest_checkpoint(files: Files) -> Files:
    """Returns the files of a run that continues after its ranks are lost.

    It continues from its newest intact checkpoint, or without one from its start.
    """
    point = files.beginning.find_point(resume=True)
    beginning = replace(files.beginning, point=point)
    suspects = files.lost.suspects_now()
    return replace(
        files,
        beginning=beginning,
        state=resumed_state(point, beginning.order.kl_control),
        spool=None,
        suspects=suspects,
    )


def _poll(run_dir: RunDir, stop: StopFlag) -> None:
    """Raises LostLock if the run directory belongs to another process now, and Interrupted if the run must stop."""
    run_dir.raise_if_lost()
    stop.raise_if_set()


@contextmanager
def _spool(order: FilesOrder, run_dir: RunDir, origin: SampledBy | None) -> Iterator[Spool]:
    """Makes the spool, which keeps files for a later start.

    `origin`: the origin of earlier groups that it takes over.
    """
    writing = closing(GroupWriter(order.deployment.cluster.step_timeout_s, order.token_routes))
    with ExitStack() as afterwards, writing as writer:
        spool = Spool(run_dir.spool, writer, run_dir.check_lock, origin)
        afterwards.callback(spool.close)  # after all writers
        yield spool
