"""The third step of assembling a run: starts its processes on the cluster, which are engines, the actor's ranks and
scorers.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mrl.cluster.actor_group import ActorGroup, RankOrder
from mrl.cluster.gates import MemoryGate
from mrl.cluster.process_logs import with_log_tails
from mrl.cluster.rollout_group import EngineOrder, RolloutGroup
from mrl.cluster.scoring import ScorerGroup, ScorerOrder, start_scorers
from mrl.cluster.seats import Seats, SharedSeats, actor_seats, engine_seats, shared_seats
from mrl.cluster.weight_sync import WeightSync
from mrl.config.deployment import Deployment
from mrl.config.schema import ModelConfig, ReshardConfig, RunConfig
from mrl.config.schema_actor import OPTIMIZER
from mrl.driver.assemble_files import Files
from mrl.driver.placement import Colocated, Placement, Separate
from mrl.model import ModelSpec
from mrl.record.attempts import read_attempts
from mrl.reward.items import RewardSpec

NODE_S = 300.0  # that a node with lost ranks may take to come back


@dataclass(frozen=True)
class Processes:
    """Engines, ranks and scorers, ready to work, and the placement that says who uses a device when."""

    engines: RolloutGroup
    actor: ActorGroup
    scorers: ScorerGroup
    placement: Placement
    rank_seats: Seats | None  # of ranks that share devices with engines; None: ranks have their own devices


@dataclass(frozen=True)
class ProcessOrder:
    """The processes of a run, and how weights go from ranks to engines."""

    ranks: RankOrder
    engines: EngineOrder
    scorers: ScorerOrder
    model: ModelConfig
    reshard: ReshardConfig
    from_adapter: bool  # ranks begin with an adapter that engines do not have

    @classmethod
    def of(cls, config: RunConfig, model: ModelSpec, reward: RewardSpec, logs: Path) -> "ProcessOrder":
        """Returns the order of a configuration. Engines load no weights if the first sync brings and checks all."""
        return cls(
            RankOrder.of(config, model),
            EngineOrder.of(config, model, logs, first_sync_brings_all(config.reshard)),
            ScorerOrder(config.reward, reward, config.model.path, logs),
            config.model,
            config.reshard,
            config.actor.lora.path is not None,
        )

    @property
    def deployment(self) -> Deployment:
        """The sections that say how many processes there are."""
        return self.engines.deployment


def start_processes(
    kept: ExitStack,
    own: ExitStack,
    order: ProcessOrder,
    files: Files,
    before: RolloutGroup | None = None,
) -> Processes:
    """Starts all processes and loads the model.

    `kept` ends engines and scorers, `own` the ranks. `before`: earlier engines that these replace, without those that
    were given up. Raises an error of mrl.errors, with the last lines of the failed process's logs.
    """
    kept.enter_context(with_log_tails(files.run_dir.logs))
    judging: list[ScorerGroup] = []

    def start_judging(engines: RolloutGroup) -> None:
        judging.append(kept.enter_context(start_scorers(order.scorers, engines.nodes)))

    if order.deployment.is_colocated:
        shared = shared_seats(order.deployment)
        kept.callback(shared.release)
        seats = shared.ranks
        engines, actor = _on_shared_devices(kept, own, order, files, shared, before, start_judging)
    else:
        seats = None
        engines, actor = _beside_each_other(kept, own, order, files, before, start_judging)
    actor.read_routes_at(engines.nodes.values())
    (scorers,) = judging
    placement = _placement(order, actor, engines, files)
    if before is None:
        for each in read_attempts(files.run_dir.path):
            engines.fleet.spent_at(each.engines_restarted)
    return Processes(engines, actor, scorers, placement, seats)


def restart_ranks(own: ExitStack, order: ProcessOrder, files: Files, before: Processes) -> Processes:
    """Starts new ranks beside the engines of `before`, which drop their requests and serve no version.

    Raises Interrupted if an engine does not answer, and EnvironmentFault if the ranks find no room within NODE_S.
    Errors of starting ranks are raised as well.
    """
    engines = before.engines
    if before.rank_seats is not None:
        engines.fleet.hold_starts(files.poll)  # vLLM would count memory of the arriving ranks as its own
    engines.give_up(files.state.step, sleeps=before.rank_seats is not None)
    deployment = order.deployment
    within_s = min(NODE_S, deployment.cluster.start_timeout_s)
    seats = before.rank_seats or actor_seats(deployment.cluster, deployment.layout, within_s)
    actor = ActorGroup(order.ranks, seats, files.run_dir.path, files.poll)
    own.callback(actor.stop)
    actor.start(files.beginning.checkpoint)
    actor.read_routes_at(engines.nodes.values())
    placement = _placement(order, actor, engines, files, are_fresh=False)
    return replace(before, actor=actor, placement=placement)


def first_sync_brings_all(reshard: ReshardConfig) -> bool:
    """Tells whether a run's engines may start without weights, because the first sync brings and checks all of them.

    The fast path does. Its plan covers every tensor of the weight map, for every family. An engine with a parameter
    outside the plan refuses to take part. Values derived from parameters are made anew and compared. Finally, digests
    of the engines' weights are compared. The slow path has no digests.
    """
    return reshard.path == "fast"


def _beside_each_other(
    kept: ExitStack,
    own: ExitStack,
    order: ProcessOrder,
    files: Files,
    before: RolloutGroup | None,
    start_judging: Callable[[RolloutGroup], None],
) -> tuple[RolloutGroup, ActorGroup]:
    """Starts engines and scorers while ranks load."""
    deployment = order.deployment
    engines = RolloutGroup(order.engines, engine_seats(deployment), files.poll, before)
    kept.callback(engines.stop)
    engines.start()
    seats = actor_seats(deployment.cluster, deployment.layout)
    actor = ActorGroup(order.ranks, seats, files.run_dir.path, files.poll)
    own.callback(actor.stop)
    actor.start(files.beginning.checkpoint, meanwhile=partial(start_judging, engines))
    engines.wait_started()
    return engines, actor


def _on_shared_devices(
    kept: ExitStack,
    own: ExitStack,
    order: ProcessOrder,
    files: Files,
    seats: SharedSeats,
    before: RolloutGroup | None,
    start_judging: Callable[[RolloutGroup], None],
) -> tuple[RolloutGroup, ActorGroup]:
    """Starts engines first, which then sleep.

    vLLM measures a device's free memory. It would count a model that arrives meanwhile as its own.
    """
    engines = RolloutGroup(order.engines, seats.engines, files.poll, before)
    kept.callback(engines.stop)
    engines.start()
    start_judging(engines)
    engines.wait_started()
    engines.call("sleep")
    actor = ActorGroup(order.ranks, seats.ranks, files.run_dir.path, files.poll)
    own.callback(actor.stop)
    actor.start(files.beginning.checkpoint)
    return engines, actor


def _placement(
    order: ProcessOrder, actor: ActorGroup, engines: RolloutGroup, files: Files, are_fresh: bool = True
) -> Placement:
    plan = files.beginning.plan
    rollout = order.deployment.rollout
    engines.fleet.restart(rollout.restart_limit, rollout.min_engines, files.notes.engine_restarted)
    sync = WeightSync(order.model, order.deployment, order.reshard, actor, engines)
    if not order.deployment.is_colocated:
        return Separate(actor, sync, are_fresh and engines.have_loaded and not order.from_adapter)
    gate = MemoryGate(plan, actor, engines)
    beside_log_probs = plan["memory"]["phases"].get("rollout_to_log_prob", {}).get("terms", ())
    return Colocated(actor, engines, sync, gate, prefetched=[OPTIMIZER] if OPTIMIZER in beside_log_probs else [])
