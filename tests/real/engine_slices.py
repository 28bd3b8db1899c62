"""One real vLLM engine that takes its weights shard by shard from a file instead of from ranks: `python
engine_slices.py JOB.json`.

Everything from the plan to the read-back is the product's own; only the wire is replaced, by one that packs each
message from a checkpoint.
"""

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file

from mrl.engine import receive
from mrl.engine.handshake import HandshakeError, check_loader
from mrl.engine.leftovers import shared_memory_below
from mrl.engine.load_layout import layers_of
from mrl.engine.receive import adapter_module
from mrl.errors import EnvironmentFault
from mrl.reshard.execute import Receiver, wire_views
from mrl.reshard.messages import Message
from mrl.reshard.setup import SyncSetup

# vLLM imports this module in its workers
adapter = importlib.import_module(adapter_module()) if __name__ != "__main__" else None
Base = adapter.WorkerExtension if adapter else object


class FileEnd:
    """A ReceivingEnd whose messages are packed from full HF tensors."""

    staging_bytes = 0
    weights: ClassVar[dict[str, torch.Tensor]] = {}

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def begin(self, update: int) -> None:
        """Nothing to prepare."""

    def is_remote(self, message: Message) -> bool:
        """Nothing comes through a communicator."""
        return False

    def ask(self, messages: Sequence[Message]) -> None:
        """Nobody to ask."""

    def take(self, messages: Sequence[Message]) -> list[torch.Tensor]:
        """The messages as a sender would pack them."""
        buffers = []
        for message in messages:
            buffer = torch.empty(message.nbytes, dtype=torch.uint8)
            for copy, view in zip(message.copies, wire_views(message, buffer, self.dtype), strict=True):
                view.copy_(self.weights[copy.hf_name][copy.hf_box.slices])
            buffers.append(buffer)
        return buffers

    def lasting(self, message: Message) -> bool:
        """Every message has memory of its own."""
        return False

    def release(self, messages: Sequence[Message]) -> None:
        """Nothing is kept."""

    def abandon(self) -> None:
        """Nobody to tell."""

    def close(self) -> None:
        """Nothing to close."""


def connect(setup: SyncSetup, worker: int) -> Receiver:
    """In the place of mrl.reshard.connect.connect_receiver."""
    dtype = getattr(torch, setup.dtype)
    return Receiver(setup.plan(), worker, FileEnd(dtype), dtype)


class SlicesExtension(Base):
    """The product's worker extension, with a wire made of files and ways to do damage."""

    def take(self, info: dict) -> None:
        """One whole update."""
        self.start_weight_update()
        self.update_weights(info)
        self.finish_weight_update()

    def use_files(self, setup: dict) -> None:
        """Initialises the fast path for `setup`."""
        receive.connect_receiver = connect
        self.init_weight_transfer_engine(
            {"path": "fast", "setup": setup, "engine": 0, "plan_hash": SyncSetup.from_json(setup).plan().hash}
        )
        self.meet_ranks()

    def refusal(self, setup: dict, plan_hash: str | None = None) -> str:
        """What the handshake says of a setup that does not fit."""
        receive.connect_receiver = connect
        try:
            made = plan_hash or SyncSetup.from_json(setup).plan().hash
            self.init_weight_transfer_engine({"path": "fast", "setup": setup, "engine": 0, "plan_hash": made})
        except (EnvironmentFault, RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def loader_refusals(self) -> list[str]:
        """What the handshake says when the plan had gate and up, or two experts, or two heads, the other way round."""
        path, found = self.update_path(), []
        for parameter in (
            "experts.routed_experts.w13_weight",
            "self_attn.qkv_proj.weight",
            "experts.routed_experts.w2_weight",
        ):
            targets = [swapped(t) if t.name.endswith(parameter) else t for t in path._targets]
            try:
                check_loader(path._model, path._setup.model, targets, path._adapter)
            except HandshakeError as error:
                found.append(str(error))
        return found

    def write(self, folder: str, drop: str = "") -> dict:
        """One update from a checkpoint; `drop`: a module whose copies do not come.

        Returns the report, or the error's text.
        """
        FileEnd.weights = load_file(Path(folder) / "model.safetensors")
        path = self.update_path()
        kept = path._receiver._rounds
        if drop:
            path._receiver._rounds = [[_without(message, drop) for message in messages] for messages in kept]
        try:
            self.take({"update": 1})
        except RuntimeError as error:
            self.abandon_update()
            return {"error": str(error)}
        finally:
            path._receiver._rounds = kept
        return self.weight_update_report()

    def write_slowly(self, folder: str) -> None:
        """The same through vLLM's own loader, as the slow path does it."""
        file = Path(folder) / "model.safetensors"
        expected = {name: list(tensor.shape) for name, tensor in load_file(file).items()}
        self.init_weight_transfer_engine({"path": "slow", "expected": expected})
        self.take({"bucket": str(file), "sha256": hashlib.sha256(file.read_bytes()).hexdigest()})

    def flip(self, module: str) -> str:
        """Flips the lowest bit of one weight where the kernel keeps it; returns the parameter's name."""
        layer = layers_of(self.model_runner.get_model(), self.adapter)[module]
        leaf = "w2_weight" if hasattr(layer, "w2_weight") else "weight"
        kernel = getattr(layer, leaf).data
        if kernel.numel():
            kernel.view(torch.uint8).view(-1)[4 * 37] ^= 1
        else:  # packed out of sight: pack a damaged copy instead
            target = next(t for t in self.update_path()._targets if t.name == f"{module}.weight")
            (weight,) = self.adapter.final_parts(self.model_runner.get_model(), layer, target)
            weight = weight.contiguous()
            weight.view(torch.uint8).view(-1)[4 * 37] ^= 1
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
            layer.quant_method.process_weights_after_loading(layer)
        return f"{module}.{leaf}"


def swapped(target):
    """A target whose first two pieces have changed places."""
    one, two, *rest = target.pieces
    if one.hf_box.shape != two.hf_box.shape:  # q and k: shift inside q instead
        rows, columns = one.hf_box.ranges
        half = (rows[1] - rows[0]) // 2
        boxes = [((rows[0], rows[0] + half), columns), ((rows[0] + half, rows[1]), columns)]
        local = [((0, half), columns), ((half, 2 * half), columns)]
        box = type(one.hf_box)
        one, two = (replace(one, hf_box=box(boxes[i]), local_box=box(local[1 - i])) for i in (0, 1))
        return replace(target, pieces=(one, two, *target.pieces[1:]))
    pieces = (replace(one, local_box=two.local_box), replace(two, local_box=one.local_box), *rest)
    return replace(target, pieces=pieces)


def _without(message: Message, module: str) -> Message:
    copies = tuple(c for c in message.copies if not c.parameter.startswith(module + "."))
    size = message.nbytes // sum(c.hf_box.volume for c in message.copies)
    return replace(message, copies=copies, nbytes=size * sum(c.hf_box.volume for c in copies))


def answers(llm) -> list:
    """Tokens and log-probs of fixed requests, one at a time: what else is in a batch may change a last bit."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [3 + (7 * i + j) % 100 for j in range(3 + i % 9)]} for i in range(16)]
    sampling = [SamplingParams(temperature=1.0, seed=i, max_tokens=10, logprobs=0, detokenize=False) for i in range(16)]
    done = [llm.generate([one], how, use_tqdm=False)[0] for one, how in zip(prompts, sampling, strict=True)]
    llm.reset_prefix_cache()
    return [
        [
            list(o.outputs[0].token_ids),
            [p[t].logprob for t, p in zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True)],
        ]
        for o in done
    ]


def main(job: dict) -> dict:
    """Starts the engine, does what the job lists and returns what came of each step."""
    from vllm import LLM
    from vllm.config.weight_transfer import WeightTransferConfig

    llm = LLM(
        **job["arguments"],
        weight_transfer_config=WeightTransferConfig(backend="mrl"),
        worker_extension_cls="engine_slices.SlicesExtension",
    )
    found = []
    for step, *arguments in job["steps"]:
        found.append(answers(llm) if step == "answers" else llm.collective_rpc(step, args=tuple(arguments)))
    segments = shared_memory_below(os.getpid())
    llm.llm_engine.engine_core.shutdown()
    for segment in segments:
        segment.unlink(missing_ok=True)
    return {"found": found}


if __name__ == "__main__":
    file = Path(sys.argv[1])
    result = main(json.loads(file.read_text()))
    file.with_suffix(".out").write_text(json.dumps(result))
