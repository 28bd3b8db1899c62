"""The Ray actor of one rank of the trained model.

Its public methods take and return small plain data.
"""

import faulthandler
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray

from mrl.algo.plain import FloatParts
from mrl.config.deployment import image_store
from mrl.config.model_folders import with_model_folders
from mrl.config.schema import RunConfig, with_values
from mrl.crash_points import crash_point
from mrl.platforms import prepare_process
from mrl.platforms.collective_trail import Trail, trail
from mrl.platforms.hosting import set_communicator_defaults, set_rank_defaults
from mrl.platforms.imports import many_imports
from mrl.platforms.inventory import host_identity
from mrl.platforms.process_memory import ProcessMemory, host_bytes_used, note_baseline
from mrl.process.free_ports import free_port
from mrl.process.own import log_to, own_cpus, stacks_file
from mrl.process.ray_nodes import own_devices
from mrl.process.same_software import software
from mrl.process.shared_folder import FolderMark
from mrl.rank.handed_rows import HandedRows
from mrl.rank.rank_step import CRITIC, RankStep, ReplicaRows, Scored, StepRows
from mrl.store.response_store import ResponseStore

WRITING = "writing"  # concurrency group of methods that a rank answers while it trains
LOOKING = "looking"  # and of those that it answers while it trains or writes
MODEL_VERBS = ("kernels", "offload", "bring", "prefetch")  # methods of MegatronActor that the driver calls


def _cuts_layers(config: RunConfig) -> bool:
    """Tells whether tensor or context ranks share a layer of any model that this process has."""
    layouts = (config.actor.layout, config.critic.layout, config.distillation.teacher_model.layout)
    return any(each.tensor_model_parallel_size * each.context_parallel_size > 1 for each in layouts if each is not None)


class ActorWorker:
    """One rank of the trained model.

    All methods are collective, so the group calls them on all ranks, except those of WRITING and LOOKING.
    """

    def __init__(self, config: dict[str, Any], rank: int, log_path: str, devices: list[tuple[str, int]] | None = None):
        """`devices` is the seat's: one device."""
        log_to(log_path)
        set_communicator_defaults()
        self._log = Path(log_path)
        self._devices = devices
        self.config = RunConfig.model_validate(config)
        set_rank_defaults(self.config.cluster.device, _cuts_layers(self.config), self.config.model.grouped_gemm)
        self.rank = rank
        self.step = None  # the current one
        self.stopped = 0  # number of the newest call of `score` that is to end early
        self.critic_rows = None  # rows of the critic's replica
        self.sync_setups = []  # of weight syncs, one for each connection that is to be opened
        self.sender = None  # of weight syncs, after connecting
        self.given_up: list[str] = []  # names of the connections of weight syncs that the driver gave up last
        self.host_copy = None  # of a checkpoint, after the first save
        self.critic_copy = None  # the same for a critic
        self.profile = None  # of the current step, where it is profiled

    @ray.method(concurrency_group=LOOKING)
    def write_stacks(self) -> Trail:
        """Writes the stacks of all threads beside the log, and returns the trail of collectives.

        Works while the rank is busy, if its process runs, and without the stacks where they cannot be written.
        """
        # on a full disk the trail alone is handed out, for a rank that answers runs
        with suppress(OSError), stacks_file(self._log).open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        return trail()

    @ray.method(concurrency_group=LOOKING)
    def collectives(self) -> int:
        """Returns to how many collectives and messages this rank has come, which is Trail.total."""
        return trail().total

    def host(self) -> str:
        """Returns the address under which the other ranks reach this one."""
        return ray.util.get_node_ip_address()

    def software(self) -> tuple[str, dict[str, str]]:
        """Returns this node's address, and the software of this process."""
        return self.host(), software()

    def host_identity(self) -> tuple[str, str]:
        """Returns this node's address, and what its communicators take for this host's identity."""
        return self.host(), host_identity()

    def sees(self, mark: FolderMark) -> tuple[str, bool]:
        """Returns this node's address, and whether it has the driver's file, for check_seen."""
        return self.host(), mark.is_seen()

    def free_port(self) -> int:
        """Returns a TCP port that is free now."""
        return free_port()

    def start(self, master_addr: str, master_port: int, checkpoint: str | None) -> int:
        """Builds the model and loads it: an mrl checkpoint, or the Hugging Face weights.

        Returns this process's id.
        """
        self.config = with_model_folders(self.config)  # those of this node
        if checkpoint is not None and self.config.actor.lora.path is not None:  # it has the adapters of the run
            self.config = with_values(self.config, {"actor.lora.path": None})
        model = self.config.model
        own = prepare_process(
            self.config.cluster.device, self.config.actor.layout.model_dump(), model.override_transformer_config
        )
        self.config = self.config.model_copy(
            update={"model": model.model_copy(update={"override_transformer_config": own})}
        )
        with many_imports():
            from mrl.rank.actor import MegatronActor

        note_baseline()
        self.actor = MegatronActor(
            self.config, self.rank, self.config.actor.layout.world_size, master_addr, master_port
        )
        self.actor.see_images(image_store(self.config, self._log.parents[1]))
        if checkpoint is not None:
            from mrl.checkpoint.manifest import CRITIC
            from mrl.rank.rank_load import load_rank

            load_rank(self.actor, Path(checkpoint))
            if self.actor.critic is not None:
                self.actor.offload()
                with self.actor.critic.in_place():
                    load_rank(self.actor.critic, Path(checkpoint), CRITIC)
                self.actor.critic.offload()
        return os.getpid()

    def begin_profile(self) -> None:
        """Begins to record the step, if this rank is one of record.profile.ranks."""
        from mrl.rank.profile import StepProfile

        wanted = self.config.record.profile.ranks
        if wanted and self.rank not in wanted:
            return
        self.profile = StepProfile(self.config.record.profile, self.actor.platform)
        self.profile.begin()

    def end_profile(self, folder: str) -> str | None:
        """Ends the recording, and writes this rank's trace into `folder`. Returns why it could not be written."""
        profile = self.profile
        self.profile = None
        if profile is None:
            return None
        return profile.end(Path(folder) / f"rank-{self.rank}.json.gz")

    def _named(self, name: str) -> AbstractContextManager[None]:
        """Names the work of the block in a profile."""
        return nullcontext() if self.profile is None else self.profile.span(name)

    @ray.method(num_returns=2)
    def score_by(self, model: str, own: ReplicaRows, samples: ResponseStore) -> tuple[None, HandedRows | None]:
        """Has this rank's replica of a second model, TEACHER or CRITIC, score `samples`, the rows of `own`."""
        from mrl.rank.second_rows import SecondRows

        crash_point("rank", self.rank, "score_by")
        self.critic_rows = None  # the former step's rows are released first
        with self._named(f"score_by {model}"):
            rows = SecondRows(self.actor, model, own, samples)
            columns = rows.columns()
        if model == CRITIC:
            self.critic_rows = rows
        return None, columns

    @ray.method(num_returns=2)
    def score(
        self, number: int, rows: StepRows, own: ReplicaRows, samples: ResponseStore, *handed: HandedRows
    ) -> tuple[Scored, HandedRows | None]:
        """Computes what an update needs of a step: see RankStep.score. `number` counts the calls, from 1."""
        self.step = None  # the former step's rows are released first
        self.step = RankStep(self.actor, rows, lambda: self.stopped >= number)
        here = ray.get_runtime_context().get_node_id()  # the rank itself reads what is on this node
        elsewhere = {node: reader for node, reader in own.readers.items() if node != here}
        with self._named("score"):
            return self.step.score(replace(own, readers=elsewhere), samples, handed)

    @ray.method(concurrency_group=LOOKING)
    def stop_scoring(self, number: int) -> None:
        """Lets a call of `score` end, on all ranks together, where they exchange numbers next.

        It runs beside `score`, and may come before it.
        """
        self.stopped = number

    @ray.method(concurrency_group=LOOKING)
    def phase(self) -> tuple[str, float]:
        """Returns the phase of `score` that the rank is at, and for how many seconds."""
        step = self.step
        if step is None:
            return "", 0.0
        name, since = step.phase
        return name, time.monotonic() - since

    def shown(self, numbers: np.ndarray, less_rollout: bool) -> np.ndarray | None:
        """Returns log-probs of rows of the step, between `score` and `update`: see RankStep.shown."""
        return self.step.shown(numbers, less_rollout)

    def update_critic(self, *returns: HandedRows) -> list[FloatParts] | None:
        """Updates the critic with the rows of `score_by`, which then are gone; see SecondRows.update."""
        crash_point("rank", self.rank, "update_critic")
        with self._named("update_critic"):
            parts = self.critic_rows.update(self.step.critic_counts(), returns)
        self.critic_rows = None
        return parts

    def update(self, trains: bool = True) -> tuple[list[FloatParts], dict[str, float]]:
        """Updates the actor with the rows of `score`, which then are gone: see RankStep.update.

        Without `trains` it only drops the rows.
        """
        crash_point("rank", self.rank, "update")
        step = self.step
        self.step = None
        if not trains:
            return [], {}
        with self._named("update"):
            return step.update()

    def do(self, verb: str, *arguments: Any) -> Any:
        """Calls one of MODEL_VERBS on MegatronActor."""
        crash_point("rank", self.rank, verb)
        if verb not in MODEL_VERBS:
            raise ValueError(f"a rank was asked to {verb}, which is none of {', '.join(MODEL_VERBS)}")
        return getattr(self.actor, verb)(*arguments)

    def speed(self) -> tuple[str, float]:
        """Returns the name of this rank's device and its FLOP/s; on the CPU with all cores of the host."""
        return self.actor.speed(own_cpus())

    def host_bytes_used(self) -> int:
        """Returns the bytes of memory in use on this rank's host."""
        return host_bytes_used()

    def memory(self) -> ProcessMemory:
        """Returns the memory of this rank's process, including a checkpoint's copies on the host."""
        copies = [copy for copy in (self.host_copy, self.critic_copy) if copy is not None]
        return self.actor.memory(tensor for copy in copies for tensor in copy.tensors.values())

    def export_buckets(self, limit_bytes: int) -> Iterator[str | np.ndarray]:
        """Yields full HF tensors in safetensors buckets of about `limit_bytes`. Only rank 0 yields; the others take
        part.

        For engines in FP8 these are FP8 values and scales. For each bucket the SHA-256 comes first, then the bytes, so
        that the driver sees an error without fetching data.
        """
        from safetensors.torch import save

        from mrl.model.quantised import quantised_tensors
        from mrl.reshard.quantise import quantised

        block = self.config.rollout.fp8_block
        quantised_names = quantised_tensors(self.actor.model) if block else ()
        bucket = {}
        size = 0
        # the exporter keeps the parameters on the device until it is closed, even if this generator is abandoned
        with closing(self.actor.export_hf()) as exported:
            for name, tensor in exported:
                if self.rank:
                    continue
                if bucket and size + tensor.nbytes > limit_bytes:
                    yield from _packed(save(bucket))
                    bucket = {}
                    size = 0
                for part, values in quantised(name, tensor.detach(), quantised_names, block):
                    # the exporter may reuse its buffers, and views share storage, which safetensors refuses
                    bucket[part] = values.cpu().clone(memory_format=_contiguous())
                    size += values.nbytes
        if bucket:
            yield from _packed(save(bucket))

    def devices(self) -> list[tuple[str, int | None]]:
        """Returns this rank's node, and its device if there is one."""
        return self._devices or own_devices() or [(ray.get_runtime_context().get_node_id(), None)]

    def agree_on_sync(self, setups: list[dict[str, Any]], plan_hash: str, keep: list[int]) -> None:
        """Builds the plan of the weight syncs and checks this rank's parameters against it.

        `setups` are the connections that `connect_sync` will open. Those to the workers `keep` stay as they are, all
        others are closed. Raises EnvironmentFault if the plan differs from the driver's, RuntimeError naming parameters
        that differ from the plan.
        """
        from mrl.model.adapters import all_shards
        from mrl.model.megatron_shards import local_shapes
        from mrl.rank.local_parameters import LocalParameters
        from mrl.reshard.setup import SyncSetup

        if self.sender is not None:
            self.sender.keep(keep)
        self.sync_setups = [SyncSetup.from_json(setup) for setup in setups]
        for agreed in self.sync_setups[:1]:  # all have the same plan
            agreed.check_hash(plan_hash, f"rank {self.rank}")
            held = all_shards(agreed.model, agreed.train_layout, self.rank, self.actor.lora)
            LocalParameters(self.actor.chunks, self.actor.predicting_chunk).check(local_shapes(held))
        if self.sender is not None and self.sender.plan.hash != plan_hash:
            self.sender.close()
            self.sender = None

    @ray.method(concurrency_group=LOOKING)
    def give_up_connecting(self, names: list[str]) -> None:
        """Ends a `connect_sync` that waits for an engine that will not come. `names`: of its connections."""
        self.given_up = names

    def connect_sync(self) -> None:
        """Connects to the engines of the agreed connections, one after the other, which connect at the same time.

        All ranks take the engines in the same order, so none waits for a rank that waits for another engine. Raises
        TransferError.
        """
        from mrl.config.schema_actor import PARAMETERS
        from mrl.rank.local_parameters import LocalParameters
        from mrl.reshard.connect import open_sender

        with self.actor.residence.using(PARAMETERS):
            for setup in self.sync_setups:
                if self.sender is None:
                    shards = LocalParameters(self.actor.chunks, self.actor.predicting_chunk)
                    self.sender = open_sender(setup, self.rank, shards, self.actor.adapters)
                self.sender.connect(setup, partial(self._check_connecting, setup.transport["name"]))

    def _check_connecting(self, name: str) -> None:
        from mrl.reshard.transport import TransferError

        if name in self.given_up:
            raise TransferError(f"rank {self.rank} connects no more: the driver gave this connection up")

    def send_weights(self, update: int, workers: list[int], check_replicas: bool) -> dict[str, Any]:
        """Sends this rank's part of the weights to `workers`. Returns the fields of a SendReport."""
        from mrl.config.schema_actor import PARAMETERS

        crash_point("rank", self.rank, "send_weights")
        with self.actor.residence.using(PARAMETERS):
            return self.sender.send(update, workers, check_replicas).to_json()

    def take_checkpoint(self) -> int:
        """Copies this rank's part of a checkpoint to host memory. Returns the bytes that writing it will need."""
        from mrl.checkpoint.manifest import CRITIC
        from mrl.rank.rank_save import HostCopy

        self.host_copy = self.host_copy or HostCopy()
        nbytes = self.host_copy.take(self.actor)
        if self.actor.critic is None:
            return nbytes
        self.actor.offload()  # so that the critic has the room that it has in its updates
        self.critic_copy = self.critic_copy or HostCopy(CRITIC)
        with self.actor.critic.in_place():
            nbytes += self.critic_copy.take(self.actor.critic)
        self.actor.critic.offload()
        return nbytes

    @ray.method(concurrency_group=WRITING)
    def write_checkpoint(self, folder: str) -> dict[str, Any]:
        """Writes the last copy into `folder`, beside other calls. Returns its part of the manifest.

        The part of a critic is in it, under its name.
        """
        crash_point("rank", self.rank, "write_checkpoint")
        part = self.host_copy.write(Path(folder)).to_json()
        if self.critic_copy is not None:
            part["critic"] = self.critic_copy.write(Path(folder)).to_json()
        return part


def _contiguous():
    import torch

    return torch.contiguous_format


def _packed(data: bytes) -> Iterator[str | np.ndarray]:
    """Yields digest and bytes. A generator, not a tuple: Ray sends into what a streaming method yields from."""
    yield hashlib.sha256(data).hexdigest()
    yield np.frombuffer(data, np.uint8)
