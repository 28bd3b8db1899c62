"""Second step of assembling a run: where it begins, and then its directory with what is kept there.

`Beginning` is found by reading alone; `open_files` writes, and asks for one: every refusal before it leaves no trace.
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
from mrl.config.places import Deployment
from mrl.config.schema import RunConfig
from mrl.errors import DamagedCheckpoint
from mrl.flow.group_writer import GroupParts, GroupWriter
from mrl.model import load_model_spec
from mrl.plan.run_plan import plan_again
from mrl.platforms.process_tree import end_descendants
from mrl.platforms.versions import installed_versions
from mrl.record.attempts import AttemptNotes, attempt
from mrl.record.run_dir import RunDir
from mrl.schedule.suspects import Suspects
from mrl.train.assemble_data import Data
from mrl.train.kept_groups import read_kept, read_left
from mrl.train.lost_engines import LostEngines
from mrl.train.preflight import plug_ins, run_dir_path
from mrl.train.resume import RunIdentity, TrainState, made_by, resume_point, resumed_state
from mrl.train.sampled_by import UNKNOWN, SampledBy, Sources, sources_of
from mrl.train.spool import Spool
from mrl.train.stop_signals import StopFlag, stop_on_signals
from mrl.vllm.leftovers import remove_noted


@dataclass(frozen=True)
class Beginning:
    """Where the run begins, on a cluster that is joined and large enough for it.

    Whatever configuration, data, checkpoint or cluster could refuse has been asked.
    """

    folder: Path
    identity: RunIdentity
    point: Newest | None  # None of a new run
    find_point: Callable[..., Newest | None]  # looks for it again; `resume`: whether it may be the run's own newest
    plan: dict[str, Any]
    data_fingerprint: str
    token_routes: int  # bytes of a token's routes, as they come with samples
    step_timeout_s: float  # of calls to Ray's processes
    sources: Sources = UNKNOWN

    @property
    def checkpoint(self) -> Path | None:
        """Folder of the checkpoint that ranks load; None where there is none yet."""
        if self.point is None:
            return None
        return self.point.path


def find_beginning(
    stack: ExitStack,
    config: RunConfig,
    data: Data,
    resume: bool,
    damaged: Mapping[Path, DamagedCheckpoint],
    stop: StopFlag,
) -> Beginning:
    """Joins Ray, and from then on obeys signals; `stack` ends both. `damaged`: checkpoints that are passed over.

    Raises one of mrl.errors.
    """
    identity = RunIdentity.of(config)
    folder = run_dir_path(config.trainer, resume)
    find_point = partial(
        resume_point,
        config.trainer,
        identity,
        folder,
        damaged=damaged,
        data_fingerprint=data.fingerprint,
        resume=resume,
    )
    point = find_point()
    deployment = Deployment.of(config)
    stack.enter_context(ray_cluster(deployment))
    model = load_model_spec(config.model.path)
    held_out = None
    if data.val_prompts:
        held_out = len(data.val_prompts)
    plan = plan_again(config, model, RunDir(folder).plan, held_out)
    check_object_stores(plan["memory"]["host"]["object_store_bytes"], object_store_sizes(deployment))
    stop.leave_nothing = partial(leave_nothing, RunDir(folder).logs)
    stack.enter_context(stop_on_signals(stop))  # after Ray, whose own handlers abort the process
    return Beginning(
        folder,
        identity,
        point,
        find_point,
        plan,
        data.fingerprint,
        token_routes=route_bytes(config.actor, model),
        step_timeout_s=config.cluster.step_timeout_s,
        sources=sources_of(config, made_by(config.model.path, data.fingerprint), data.rows_digest, plug_ins(config)),
    )


def leave_nothing(logs: Path) -> None:
    """Ends all processes of this run on this machine, and removes what they would leave."""
    end_descendants()
    remove_own_folders()
    remove_noted(logs)


@dataclass(frozen=True)
class Files:
    """The run directory, locked and with this attempt noted, and what the run goes on from."""

    run_dir: RunDir
    beginning: Beginning
    config_yaml: str  # of this start; it replaces that of the start before once nothing can refuse any more
    state: TrainState
    spool: Spool | None  # None until `with_spool`
    lost: LostEngines
    suspects: Suspects  # prompts that engines were lost under
    poll: Callable[[], None]  # raises once the directory is lost or the run is to stop
    notes: AttemptNotes
    # by number: groups that a start before finished by the weights of `state`; none until `with_spool`
    left: Mapping[int, GroupParts] = field(default_factory=dict)


def open_files(
    stack: ExitStack,
    beginning: Beginning,
    config_yaml: str,
    resume: bool,
    stop: StopFlag,
    plug_ins: Sequence[Mapping[str, str]] = (),
) -> Files:
    """Takes the run directory; `stack` gives it back last, once nobody else writes. Raises one of mrl.errors.

    Where it was waited for, another process may have gone on meanwhile: the checkpoint is looked for again.
    """
    run_dir = RunDir.open(beginning.folder, config_yaml, resume, stop.raise_if_set)
    stack.callback(run_dir.close)
    stack.callback(remove_noted, run_dir.logs)  # of engines that were killed, by this run too
    beginning = replace(beginning, point=beginning.find_point())
    state = resumed_state(beginning.point)
    noted = attempt(run_dir.path, state.step, installed_versions(), run_dir.check_lock, plug_ins)
    notes = stack.enter_context(noted)
    lost = LostEngines(run_dir.lost_engines, run_dir.check_lock)
    poll = partial(_poll, run_dir, stop)
    return Files(run_dir, beginning, config_yaml, state, None, lost, lost.suspects(), poll, notes)


def with_spool(own: ExitStack, files: Files) -> Files:
    """The files with the groups on their way that the resume point has, and with those that were finished by its
    weights; `own` gives these up.
    """
    beginning = files.beginning
    state = files.state
    origin = None
    if beginning.point is not None:
        origin = beginning.sources.by(state.step, state.weights)
    spool = own.enter_context(_spool(beginning, files.run_dir, origin))
    if state.step and "ahead" in files.beginning.point.manifest.trainer:
        written = files.beginning.point.manifest.trainer["ahead"]
        state = replace(state, ahead=read_kept(files.beginning.checkpoint, written, spool))
    most = beginning.plan["memory"]["host"]["object_store_bytes"]
    return replace(files, spool=spool, state=state, left=read_left(spool, most, beginning.token_routes))


def at_newest_checkpoint(files: Files) -> Files:
    """The files of a run that goes on after its ranks are lost.

    It goes on from its newest intact checkpoint, without one from its start.
    """
    point = files.beginning.find_point(resume=True)
    beginning = replace(files.beginning, point=point)
    suspects = files.lost.suspects_now()
    return replace(files, beginning=beginning, state=resumed_state(point), spool=None, suspects=suspects)


def _poll(run_dir: RunDir, stop: StopFlag) -> None:
    """Raises LostLock once the run directory is another process's, and Interrupted once the run is to stop."""
    run_dir.raise_if_lost()
    stop.raise_if_set()


@contextmanager
def _spool(beginning: Beginning, run_dir: RunDir, origin: SampledBy | None) -> Iterator[Spool]:
    """Makes the spool, which keeps what a later start may use. `origin`: of what it takes over of earlier ones."""
    writing = closing(GroupWriter(beginning.step_timeout_s, beginning.token_routes))
    with ExitStack() as afterwards, writing as writer:
        spool = Spool(run_dir.spool, writer, run_dir.check_lock, origin)
        afterwards.callback(spool.close)  # once nobody writes
        yield spool
