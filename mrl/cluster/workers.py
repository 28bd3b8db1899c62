"""The two kinds of Ray actors: one Megatron rank, one vLLM engine.

Their public methods take and return small plain data.
"""

import faulthandler
import hashlib
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from mrl.cluster.prerequisites import free_port, own_cpus
from mrl.cluster.same_software import software
from mrl.cluster.shared_folder import Mark
from mrl.config.model_folders import with_model_folders
from mrl.config.schema import RunConfig
from mrl.data.samples import Samples
from mrl.flow.kept_tokens import fetched, going_on, with_kept
from mrl.flow.outbox import Outboxes
from mrl.flow.response_store import ResponseBlock, ResponseStore
from mrl.flow.routes import Readers
from mrl.megatron.cut import ReplicaCut
from mrl.model.hub import local_folder
from mrl.platforms import prepare_process
from mrl.platforms.addresses import address_environment
from mrl.platforms.imports import many_imports
from mrl.platforms.inventory import device_number
from mrl.platforms.process_memory import ProcessMemory, host_bytes_used, note_baseline
from mrl.remote.process_logs import stacks_file
from mrl.schedule.engine_loads import request_limit_of
from mrl.vllm.engine_state import CONTROL_VERBS
from mrl.vllm.requests import EngineReading

WRITING = "writing"  # the methods that a rank answers in a thread of their own, while it trains
LOOKING = "looking"  # and in another one, while it trains or writes
MODEL_VERBS = ("kernels", "offload", "bring", "prefetch")  # methods of MegatronActor that the driver calls


def log_to(path: str) -> None:
    """Sends this process's stdout and stderr, its children's included, to a file of the run directory."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def own_places() -> list[tuple[str, int]]:
    """(node, device) of every accelerator that Ray gave this process."""
    context = ray.get_runtime_context()
    devices = next((ids for ids in context.get_accelerator_ids().values() if ids), [])
    return [(context.get_node_id(), device_number(device)) for device in devices]


class ActorWorker:
    """One rank of the trained model.

    Every method but those of WRITING and LOOKING is collective: the group calls it on all ranks.
    """

    def __init__(self, config: dict[str, Any], rank: int, log_path: str, places: list[tuple[str, int]] | None = None):
        """`places`: see Seat; of one device."""
        log_to(log_path)
        self._log = Path(log_path)
        self._places = places
        self.config = RunConfig.model_validate(config)
        self.rank = rank
        self.batch = None  # rows of the newest step
        self.sync_setup = None  # of weight syncs, once it is agreed on
        self.sender = None  # of them, once they are connected
        self.host_copy = None  # of a checkpoint, once one is saved
        self.critic_copy = None  # the same of a critic

    @ray.method(concurrency_group=LOOKING)
    def write_stacks(self) -> None:
        """Writes beside its log where every thread of this rank is; answers whatever the rank is at, if it runs."""
        with stacks_file(self._log).open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)

    def host(self) -> str:
        """Address under which the other ranks reach this one."""
        return ray.util.get_node_ip_address()

    def software(self) -> tuple[str, dict[str, str]]:
        """This node's address, and what runs here."""
        return self.host(), software()

    def sees(self, mark: Mark) -> tuple[str, bool]:
        """This node's address, and whether the driver's file is here, too; see check_seen."""
        return self.host(), mark.is_seen()

    def free_port(self) -> int:
        """A TCP port that nobody listens on now."""
        return free_port()

    def start(self, master_addr: str, master_port: int, checkpoint: str | None) -> int:
        """Builds the model and loads it: a checkpoint of ours, or the Hugging Face weights.

        Returns this process's id.
        """
        self.config = with_model_folders(self.config)  # this node's
        model = self.config.model
        own = prepare_process(
            self.config.cluster.device, self.config.actor.layout.model_dump(), model.override_transformer_config
        )
        self.config = self.config.model_copy(
            update={"model": model.model_copy(update={"override_transformer_config": own})}
        )
        with many_imports():
            from mrl.megatron.actor import MegatronActor

        note_baseline()
        self.actor = MegatronActor(
            self.config, self.rank, self.config.actor.layout.world_size, master_addr, master_port
        )
        if checkpoint is not None:
            from mrl.checkpoint.manifest import CRITIC
            from mrl.checkpoint.rank_load import load_rank

            load_rank(self.actor, Path(checkpoint))
            if self.actor.critic is not None:
                self.actor.offload()
                load_rank(self.actor.critic, Path(checkpoint), CRITIC)
                self.actor.critic.offload()
        return os.getpid()

    def begin_step(self, samples: ResponseStore, own: np.ndarray, cut: ReplicaCut, readers: Readers) -> None:
        """Fetches the rows of a step; see RankBatch."""
        from mrl.flow.rank_batch import RankBatch  # torch with it, which a prepared process alone may import

        self.batch = None  # the rows of the step before go first
        here = ray.get_runtime_context().get_node_id()  # what lies here, the rank cuts out itself
        elsewhere = {node: reader for node, reader in readers.items() if node != here}
        self.batch = RankBatch.fetched(self.actor, samples, own, cut, elsewhere)

    def do(self, verb: str, *arguments: Any) -> Any:
        """Asks MegatronActor for one of MODEL_VERBS, or the rows of the step for one of RankBatch's verbs."""
        if verb in MODEL_VERBS:
            return getattr(self.actor, verb)(*arguments)
        return self.batch.do(verb, *arguments)

    def speed(self) -> tuple[str, float]:
        """Name of this rank's device and its FLOP/s, on the CPU with all cores of the host."""
        return self.actor.speed(own_cpus())

    def host_bytes_used(self) -> int:
        """Bytes of memory in use on this rank's host."""
        return host_bytes_used()

    def memory(self) -> ProcessMemory:
        """What this rank's process holds, the copy of a checkpoint on the host too."""
        copies = [copy for copy in (self.host_copy, self.critic_copy) if copy is not None]
        return self.actor.memory(tensor for copy in copies for tensor in copy.tensors.values())

    def export_buckets(self, limit_bytes: int) -> Iterator[str | np.ndarray]:
        """Full HF tensors in safetensors buckets of about `limit_bytes`; only rank 0 yields, the others take part.

        Of each bucket first the SHA-256, then the bytes: so the driver sees an error without fetching data.
        """
        from safetensors.torch import save

        bucket = {}
        size = 0
        # it holds the parameters on the device until it ends, also where we are left
        with closing(self.actor.export_hf()) as exported:
            for name, tensor in exported:
                if self.rank:
                    continue
                if bucket and size + tensor.nbytes > limit_bytes:
                    yield from _packed(save(bucket))
                    bucket = {}
                    size = 0
                # the exporter may reuse its buffers, and views share storage, which safetensors refuses
                bucket[name] = tensor.detach().cpu().clone(memory_format=_contiguous())
                size += tensor.nbytes
        if bucket:
            yield from _packed(save(bucket))

    def places(self) -> list[tuple[str, int | None]]:
        """Node, and device on it where there is one, of this rank."""
        return self._places or own_places() or [(ray.get_runtime_context().get_node_id(), None)]

    def agree_on_sync(self, setup: dict[str, Any], plan_hash: str) -> None:
        """Builds the plan of the weight syncs and checks this rank's parameters against it.

        Raises EnvironmentFault when it is not the driver's plan, RuntimeError naming parameters that are not as the
        plan has them.
        """
        from mrl.megatron.local_parameters import LocalParameters
        from mrl.model.adapters import all_shards
        from mrl.model.megatron_shards import local_shapes
        from mrl.reshard.setup import SyncSetup

        agreed = SyncSetup.from_json(setup)
        agreed.check_hash(plan_hash, f"rank {self.rank}")
        if self.sender is not None:
            self.sender.close()
        held = all_shards(agreed.model, agreed.train_layout, self.rank, self.actor.lora)
        LocalParameters(self.actor.chunks).check(local_shapes(held))
        self.sync_setup = agreed

    def connect_sync(self) -> None:
        """Meets the engines, which do the same now. Raises TransferError."""
        from mrl.config.schema_actor import PARAMETERS
        from mrl.megatron.local_parameters import LocalParameters
        from mrl.reshard.connect import connect_sender

        with self.actor.residence.using(PARAMETERS):
            shards = LocalParameters(self.actor.chunks)
            self.sender = connect_sender(self.sync_setup, self.rank, shards, self.actor.adapters)

    def send_weights(self, update: int, workers: list[int], check_replicas: bool) -> dict[str, Any]:
        """Sends this rank's part of the weights to `workers`; fields of a SendReport."""
        from mrl.config.schema_actor import PARAMETERS

        with self.actor.residence.using(PARAMETERS):
            return self.sender.send(update, workers, check_replicas).to_json()

    def take_checkpoint(self) -> int:
        """Copies this rank's part of a checkpoint to host memory; returns the bytes that writing it will need."""
        from mrl.checkpoint.manifest import CRITIC
        from mrl.checkpoint.rank_save import HostCopy

        self.host_copy = self.host_copy or HostCopy()
        taken = self.host_copy.take(self.actor)
        if self.actor.critic is None:
            return taken
        self.actor.offload()  # so that the critic has the room that it has in its updates
        self.critic_copy = self.critic_copy or HostCopy(CRITIC)
        taken += self.critic_copy.take(self.actor.critic)
        self.actor.critic.offload()
        return taken

    @ray.method(concurrency_group=WRITING)
    def write_checkpoint(self, folder: str) -> dict[str, Any]:
        """Writes what was taken last into `folder`, beside other calls; returns its part of the manifest.

        That of a critic is in it, under its name.
        """
        part = self.host_copy.write(Path(folder)).to_json()
        if self.critic_copy is not None:
            part["critic"] = self.critic_copy.write(Path(folder)).to_json()
        return part


def _contiguous():
    import torch

    return torch.contiguous_format


def _packed(data: bytes) -> Iterator[str | np.ndarray]:
    """Yields digest and bytes. It is a generator and no tuple: Ray sends into what a streaming method yields from."""
    yield hashlib.sha256(data).hexdigest()
    yield np.frombuffer(data, np.uint8)


class EngineWorker:
    """One vLLM engine in a Ray actor, or one data-parallel rank of it."""

    conversations = None  # where responses are of several turns, once it is started

    def __init__(
        self, settings, log_path: str, places: list[tuple[str, int]] | None = None,
        environment: Mapping[str, str] | None = None, folder: str | None = None,
    ):  # fmt: skip
        """`places`: see Seat; of a device a worker. `environment` and `folder`: of the command that the user gave, for
        tools and agents.
        """
        from mrl.vllm.engine import VllmEngine

        log_to(log_path)
        self._places = places
        os.environ |= address_environment(ray.util.get_node_ip_address())  # vLLM's own processes inherit it
        # vLLM 0.23's coordinator of ranks would ask twice and get one port
        if settings.arguments.get("data_parallel_size", 1) == 1:
            # where vLLM begins to look for ports; its workers listen seconds later, when one of the kernel's may be
            # taken
            os.environ.setdefault("VLLM_PORT", str(free_port()))
        model = local_folder(settings.arguments["model"])  # this node's
        self.engine = VllmEngine(replace(settings, arguments=settings.arguments | {"model": model}))
        self.outboxes = Outboxes()
        self._environment = environment
        self._folder = folder
        self._tools_log = Path(log_path).with_suffix(".tools.log")

    async def software(self) -> tuple[str, dict[str, str]]:
        """This node's address, and what runs here."""
        return ray.util.get_node_ip_address(), software()

    async def meeting_point(self) -> tuple[str, int]:
        """Address and port on this host where the ranks of an engine can meet."""
        return ray.util.get_node_ip_address(), free_port()

    async def start(self, meeting: tuple[str, int] | None = None, *_answered: Any) -> float:
        """Starts vLLM; returns seconds. `meeting`: see VllmEngine.start.

        `_answered`: what it was asked before; Ray begins no call whose arguments are not there, and this one lets
        nothing else be answered.
        """
        if self.engine.settings.turns is not None:
            from mrl.data.dataset import load_tokenizer
            from mrl.flow.call_reader import call_reader
            from mrl.flow.conversations import Conversations

            tokenizer = load_tokenizer(self.engine.settings.arguments["model"])
            self.conversations = Conversations(
                self.engine.settings.turns,
                tokenizer,
                self._tools_log,
                slots=request_limit_of(self.engine.settings.arguments["max_num_seqs"]),
                environment=self._environment,
                folder=self._folder,
                reader=call_reader,
            )
        return await self.engine.start(meeting)

    async def stopped_processes(self) -> list[str]:
        """Says which of vLLM's processes do not run, though they live."""
        from mrl.vllm.process_watch import stopped_below

        return stopped_below()

    async def processes(self) -> list[tuple[int, float]]:
        """This one and those below it; see mrl.vllm.process_watch."""
        from mrl.vllm.process_watch import processes_here

        return processes_here()

    async def check_there(self) -> None:
        """Returns once vLLM's processes have answered. Raises Interrupted when one is lost."""
        await self.engine.check_there()

    async def generate(
        self, client: int, call: int, requests, sampling, kept: dict[int, tuple[ResponseBlock, int]] | None = None
    ) -> None:
        """Answers requests; see `told` for what finished, and for what went wrong.

        `kept`: by sample_id, block and row of the tokens that a response goes on from; what is told of it is whole.
        """
        outbox = self.outboxes.of(client)
        with outbox.call(call):
            before = await fetched(kept or {})
            async for batch in self._answers(requests, sampling, before):
                outbox.add(call, batch, sampling.routes)

    async def _answers(self, requests, sampling, kept: dict[int, Samples]) -> AsyncIterator[Samples]:
        """Whole rows, those that go on from kept tokens too."""
        if self.conversations is not None:
            async for batch in self.conversations.generate(self.engine, requests, sampling, kept):
                yield batch
            return
        asked = [going_on(request, kept.get(request.sample_id)) for request in requests]
        async for batch in self.engine.generate(asked, sampling):
            yield with_kept(kept, batch)

    async def told(self, client: int, awaited: tuple[int, ...]) -> tuple:
        """What finished of a client's calls, as a tuple; see Outbox.told. Raises what one of them raised."""
        return tuple(await self.outboxes.of(client).told(awaited))

    async def blocks(self, client: int, ticket: int, routed: bool) -> list:
        """Yields None, which says that they are there, then the blocks of one answer of `told`.

        Each block comes before its routes, where there are some; they are objects of this node.
        """
        blocks = self.outboxes.of(client).taken(ticket)
        of_each = [(replace(block, routes=None), *([block.routes] if routed else [])) for block in blocks]
        return [None, *(each for values in of_each for each in values)]

    async def reading(self) -> EngineReading:
        """What the engine's meters say now, whatever state it is in."""
        all_act = self.conversations is not None and self.conversations.all_act
        return replace(self.engine.reading, all_act=all_act)

    async def do(self, verb: str, *arguments: Any) -> Any:
        """Asks the engine for one of CONTROL_VERBS, which are methods of VllmEngine.

        Raises ValueError for another name, and what the engine raises in a state in which it refuses.
        """
        if verb not in CONTROL_VERBS:
            raise ValueError(f"an engine was asked to {verb}, which is none of {', '.join(CONTROL_VERBS)}")
        if self.conversations is not None and verb in ("end_requests", "give_up"):
            await self.conversations.end(*arguments)  # first, or one whose request is ended would ask for another
        answer = await getattr(self.engine, verb)(*arguments)
        if verb == "give_up":
            self.outboxes = Outboxes()  # who asked for what is in them is gone
        return answer

    def places(self) -> list[tuple[str, int | None]]:
        """Node, and device on it where there is one, of every worker of this engine."""
        return (
            self._places
            or own_places()
            or [(ray.get_runtime_context().get_node_id(), None)] * self.engine.settings.workers
        )

    async def host_bytes_used(self) -> int:
        """Bytes of memory in use on this engine's host."""
        return host_bytes_used()

    async def stop(self) -> None:
        """Ends vLLM's processes and those of tools, and removes what an unfinished update left behind."""
        if self.conversations is not None:
            self.conversations.close()
        await self.engine.stop()
