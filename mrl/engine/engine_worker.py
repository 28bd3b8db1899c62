"""The Ray actor of one vLLM engine, or of one data-parallel rank of it.

Its public methods take and return small plain data.
"""

import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from mrl.crash_points import crash_point
from mrl.data.samples import Samples
from mrl.engine.engine_state import CONTROL_VERBS
from mrl.engine.kept_tokens import fetched, going_on, with_kept
from mrl.engine.outbox import Outboxes
from mrl.engine.requests import EngineReading
from mrl.model.hub import local_folder
from mrl.platforms.addresses import address_environment
from mrl.platforms.process_memory import host_bytes_used
from mrl.process.free_ports import free_port
from mrl.process.own import log_to
from mrl.process.ray_nodes import own_devices
from mrl.process.same_software import software
from mrl.schedule.engine_loads import request_limit_of
from mrl.store.response_store import ResponseBlock


class EngineWorker:
    """One vLLM engine in a Ray actor, or one data-parallel rank of it."""

    name = ""  # the engine's, at crash points
    conversations = None  # set after the start, if responses have several turns

    def __init__(
        self, settings, log_path: str, devices: list[tuple[str, int]] | None = None,
        environment: Mapping[str, str] | None = None, folder: str | None = None,
    ):  # fmt: skip
        """`devices` is the seat's: a device for each worker. `environment` and `folder` belong to the user's command,
        for tools and agents.
        """
        from mrl.engine.vllm_engine import VllmEngine

        log_to(log_path)
        self.name = settings.name
        self._devices = devices
        os.environ |= address_environment(ray.util.get_node_ip_address())  # inherited by vLLM's own processes
        # vLLM 0.23's coordinator of ranks would ask twice and get one port
        if settings.arguments.get("data_parallel_size", 1) == 1:
            # where vLLM begins to search for ports; its workers listen seconds later, when an ephemeral port may be
            # taken
            os.environ.setdefault("VLLM_PORT", str(free_port()))
        model = local_folder(settings.arguments["model"])  # that of this node
        self.engine = VllmEngine(replace(settings, arguments=settings.arguments | {"model": model}))
        self.outboxes = Outboxes()
        self._environment = environment
        self._folder = folder
        self._tools_log = Path(log_path).with_suffix(".tools.log")

    async def software(self) -> tuple[str, dict[str, str]]:
        """Returns this node's address, and the software of this process."""
        return ray.util.get_node_ip_address(), software()

    async def meeting_point(self) -> tuple[str, int]:
        """Returns an address and port on this host where the ranks of an engine can connect."""
        return ray.util.get_node_ip_address(), free_port()

    async def start(self, meeting: tuple[str, int] | None = None, *_answered: Any) -> float:
        """Starts vLLM and returns the seconds it took. `meeting` as in VllmEngine.start.

        `_answered` are results of earlier calls. Ray begins a call when its arguments exist, and nothing else is
        answered during this one.
        """
        if self.engine.settings.turns is not None:
            from mrl.data.dataset import load_tokenizer
            from mrl.engine.conversations import Conversations

            settings = self.engine.settings
            tokenizer = load_tokenizer(settings.arguments["model"])
            eyes = None
            if settings.images is not None:
                from mrl.data.image_reader import ImageReader

                eyes = ImageReader.of(settings.arguments["model"], settings.images)
            self.conversations = Conversations(
                settings.turns,
                tokenizer,
                self._tools_log,
                slots=request_limit_of(settings.arguments["max_num_seqs"]),
                environment=self._environment,
                folder=self._folder,
                eyes=eyes,
            )
        return await self.engine.start(meeting)

    async def stopped_processes(self) -> list[str]:
        """Returns vLLM's processes that are alive but stopped."""
        from mrl.engine.process_watch import stopped_below

        return stopped_below()

    async def processes(self) -> list[tuple[int, float]]:
        """Returns this process and those below it, as mrl.engine.process_watch describes them."""
        from mrl.engine.process_watch import processes_here

        return processes_here()

    async def check_there(self) -> None:
        """Returns after vLLM's processes have answered. Raises Interrupted when one is lost."""
        await self.engine.check_there()

    async def generate(
        self, client: int, call: int, requests, sampling, kept: dict[int, tuple[ResponseBlock, int]] | None = None
    ) -> None:
        """Answers requests. `take_finished` returns finished responses and errors.

        `kept`: by sample_id, block and row of the tokens after which a response continues. Its answer contains those
        too.
        """
        crash_point(self.name, "generate")
        outbox = self.outboxes.of(client)
        with outbox.call(call):
            before = await fetched(kept or {})
            async for batch in self._answers(requests, sampling, before):
                outbox.add(call, batch, sampling.routes)

    async def _answers(self, requests, sampling, kept: dict[int, Samples]) -> AsyncIterator[Samples]:
        """Yields complete rows, including the kept tokens."""
        if self.conversations is not None and not sampling.in_one_turn:
            async for batch in self.conversations.generate(self.engine, requests, sampling, kept):
                yield batch
            return
        asked = [going_on(request, kept.get(request.sample_id)) for request in requests]
        async for batch in self.engine.generate(asked, sampling):
            yield with_kept(kept, batch)

    async def take_finished(self, client: int, awaited: tuple[int, ...]) -> tuple:
        """Returns what finished of a client's calls, as Outbox.take_finished has it. Raises what one of them raised."""
        return tuple(await self.outboxes.of(client).take_finished(awaited))

    async def blocks(self, client: int, ticket: int, routed: bool) -> list:
        """Returns None, which says that the rest exists, then the blocks of one answer of `take_finished`.

        Each block comes before its routes, if it has some. They are objects of this node.
        """
        blocks = self.outboxes.of(client).take_blocks(ticket)
        of_each = [(replace(block, routes=None), *([block.routes] if routed else [])) for block in blocks]
        return [None, *(each for values in of_each for each in values)]

    async def reading(self) -> EngineReading:
        """Returns the engine's current metrics, in any state."""
        all_act = self.conversations is not None and self.conversations.all_act
        return replace(self.engine.reading, all_act=all_act)

    async def do(self, verb: str, *arguments: Any) -> Any:
        """Calls one of CONTROL_VERBS on the engine. They are methods of VllmEngine.

        Raises ValueError for another name, and the engine's error in a state in which it refuses.
        """
        if verb not in CONTROL_VERBS:
            raise ValueError(f"an engine has no verb {verb}; allowed: {', '.join(CONTROL_VERBS)}")
        if self.conversations is not None and verb in ("end_requests", "give_up"):
            # first, otherwise an ended request's conversation would issue another one
            await self.conversations.end(*arguments)
        crash_point(self.name, verb)
        answer = await getattr(self.engine, verb)(*arguments)
        if verb == "give_up":
            self.outboxes = Outboxes()  # the clients of its content are gone
        return answer

    def devices(self) -> list[tuple[str, int | None]]:
        """Returns the node, and the device if there is one, of every worker of this engine."""
        return (
            self._devices
            or own_devices()
            or [(ray.get_runtime_context().get_node_id(), None)] * self.engine.settings.workers
        )

    async def host_bytes_used(self) -> int:
        """Returns the bytes of memory in use on this engine's host."""
        return host_bytes_used()

    async def stop(self) -> None:
        """Ends the processes of vLLM and of tools, and removes what an unfinished update left behind."""
        if self.conversations is not None:
            self.conversations.close()
        await self.engine.stop()
