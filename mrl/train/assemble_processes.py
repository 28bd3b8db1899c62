"""The third step of assembling a run: starts its processes on the cluster, which are engines, the actor's ranks and
scorers.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mrl.cluster.actor_group import ActorGroup
from mrl.cluster.gates import MemoryGate
from mrl.cluster.rollout_group import RolloutGroup, request_limit
from mrl.cluster.seats import Seats, SharedSeats, actor_seats, shared_seats
from mrl.cluster.weight_sync import WeightSync
from mrl.config.places import Deployment
from mrl.config.schema import RunConfig
from mrl.config.schema_actor import OPTIMIZER
from mrl.flow.scoring import ScorerGroup, start_scorers
from mrl.record.attempts import read_attempts
from mrl.remote.process_logs import with_log_tails
from mrl.reward.items import RewardSpec
from mrl.train.assemble_files import Files
from mrl.train.placement import Colocated, Placement, Separate
from mrl.vllm.requests import engine_settings

NODE_S = 300.0  # that a node with lost ranks may take to come back


@dataclass(frozen=True)
class Processes:
    """Engines, ranks and scorers, ready to work, and the placement that says who uses a device when."""

    engines: RolloutGroup
    actor: ActorGroup
    scorers: ScorerGroup
    placement: Placement
    rank_seats: Seats | None  # of ranks that share devices with engines; None: ranks have their own devices


def start_processes(
    kept: ExitStack,
    own: ExitStack,
    config: RunConfig,
    reward: RewardSpec,
    files: Files,
    before: RolloutGroup | None = None,
) -> Processes:
    """Starts all processes and loads the model. Ranks get the complete configuration.

    `kept` ends engines and scorers, `own` the ranks. `before`: earlier engines that these replace, without those that
    were given up. Raises an error of mrl.errors, with the last lines of the failed process's logs.
    """
    logs = files.run_dir.logs
    kept.enter_context(with_log_tails(logs))
    judging: list[ScorerGroup] = []

    def start_judging(engines: RolloutGroup) -> None:
        started = start_scorers(config.reward, reward, config.model.path, logs, engines.nodes)
        judging.append(kept.enter_context(started))

    if config.cluster.placement == "separate":
        seats = None
        engines, actor = _beside_each_other(kept, own, config, files, before, start_judging)
    else:
        shared = shared_seats(Deployment.of(config))
        kept.callback(shared.release)
        seats = shared.ranks
        engines, actor = _on_shared_devices(kept, own, config, files, shared, before, start_judging)
    actor.read_routes_at(engines.nodes.values())
    (scorers,) = judging
    placement = _placement(config, actor, engines, files)
    if before is None:
        for each in read_attempts(files.run_dir.path):
            engines.fleet.spent_at(each.engines_restarted)
    return Processes(engines, actor, scorers, placement, seats)


def restart_ranks(own: ExitStack, config: RunConfig, files: Files, before: Processes) -> Processes:
    """Starts new ranks beside the engines of `before`, which drop their requests and serve no version.

    Raises Interrupted if an engine does not answer, and EnvironmentFault if the ranks find no room within NODE_S.
    Errors of starting ranks are raised as well.
    """
    engines = before.engines
    if before.rank_seats is not None:
        engines.fleet.hold_starts(files.poll)  # vLLM would count memory of the arriving ranks as its own
    engines.give_up(files.state.step, sleeps=before.rank_seats is not None)
    within_s = min(NODE_S, config.cluster.start_timeout_s)
    seats = before.rank_seats or actor_seats(config.cluster, config.actor.layout, within_s)
    actor = ActorGroup(config, files.run_dir.path, files.beginning.checkpoint, files.poll, seats=seats)
    own.callback(actor.stop)
    actor.read_routes_at(engines.nodes.values())
    placement = _placement(config, actor, engines, files, are_fresh=False)
    return replace(before, actor=actor, placement=placement)


def start_engines(
    config: RunConfig,
    folder: Path,
    poll: Callable[[], None] = lambda: None,
    seats: Seats | None = None,
    before: RolloutGroup | None = None,
    by_sync: bool = False,
) -> RolloutGroup:
    """Starts the engines of a configuration, with logs in `folder`/logs.

    `seats`: by default devices of their own. `before`: as in RolloutGroup. `by_sync`: they read no weights, and answer
    nothing before a sync brings them. Raises EnvironmentFault when a start-up check fails.
    """
    deployment = Deployment.of(config)
    logs = folder / "logs"
    settings = [
        engine_settings(config, engine, logs, data_rank, by_sync)
        for engine in range(config.rollout.num_engines)
        for data_rank in range(config.rollout.data_parallel_size)
    ]
    max_requests = request_limit(deployment, config.trainer.deterministic)
    return RolloutGroup(deployment, settings, max_requests, logs, poll, seats, before)


def first_sync_brings_all(config: RunConfig) -> bool:
    """Tells whether a run's engines may start without weights, because the first sync brings and checks all of them.

    The fast path does. Its plan covers every tensor of the weight map, for every family. An engine with a parameter
    outside the plan refuses to take part. Values derived from parameters are made anew and compared. Finally, digests
    of the engines' weights are compared. The slow path has no digests.
    """
    return config.reshard.path == "fast"


def _beside_each_other(
    kept: ExitStack,
    own: ExitStack,
    config: RunConfig,
    files: Files,
    before: RolloutGroup | None,
    start_judging: Callable[[RolloutGroup], None],
) -> tuple[RolloutGroup, ActorGroup]:
    """Starts engines and scorers while ranks load."""
    folder = files.run_dir.path
    engines = start_engines(config, folder, files.poll, before=before, by_sync=first_sync_brings_all(config))
    kept.callback(engines.stop)
    checkpoint = files.beginning.checkpoint
    actor = ActorGroup(config, folder, checkpoint, files.poll, meanwhile=partial(start_judging, engines))
    own.callback(actor.stop)
    engines.wait_started()
    return engines, actor


def _on_shared_devices(
    kept: ExitStack,
    own: ExitStack,
    config: RunConfig,
    files: Files,
    seats: SharedSeats,
    before: RolloutGroup | None,
    start_judging: Callable[[RolloutGroup], None],
) -> tuple[RolloutGroup, ActorGroup]:
    """Starts engines first, which then sleep.

    vLLM measures a device's free memory. It would count a model that arrives meanwhile as its own.
    """
    folder = files.run_dir.path
    engines = start_engines(config, folder, files.poll, seats.engines, before, first_sync_brings_all(config))
    kept.callback(engines.stop)
    start_judging(engines)
    engines.wait_started()
    engines.call("sleep")
    actor = ActorGroup(config, folder, files.beginning.checkpoint, files.poll, seats=seats.ranks)
    own.callback(actor.stop)
    return engines, actor


def _placement(
    config: RunConfig, actor: ActorGroup, engines: RolloutGroup, files: Files, are_fresh: bool = True
) -> Placement:
    plan = files.beginning.plan
    engines.fleet.restart(config.rollout.restart_limit, config.rollout.min_engines, files.notes.engine_restarted)
    sync = WeightSync(config.model, Deployment.of(config), config.reshard, actor, engines)
    if config.cluster.placement == "separate":
        loaded = engines.have_loaded and config.actor.lora.path is None
        return Separate(actor, sync, are_fresh and loaded)
    gate = MemoryGate(plan, actor, engines)
    beside_log_probs = plan["memory"]["phases"].get("rollout_to_log_prob", {}).get("terms", ())
    return Colocated(actor, engines, sync, gate, prefetched=[OPTIMIZER] if OPTIMIZER in beside_log_probs else [])
