"""What transformers and a fresh engine compute of the same tokens with the same weights, layer by layer.

python -m mrl.engine.layer_states JOB.json

JOB.json has `model` (a folder in Hugging Face's form), `dtype` of its weights, `device`, `arguments` of vLLM's engine,
`rows` of token ids, `watched` (how many of the first ones are watched), `experts` of a router (0: none), `temperature`,
and the name of `out`. Both sides give the log-prob of each token after the first of row N, at temperature 1 as `row.N`,
and transformers at the given one as `sampled.N`; and of the T tokens of watched rows, one row after the other,

    embedded        [T, hidden]    before the first layer
    attention.N     [T, hidden]    the residual stream between the two parts of layer N
    router.N        [T, experts]   logits of its router
    layer.N         [T, hidden]    the residual stream after it

The process writes OUT.transformers.npz and OUT.vllm.npz. It loads both models on one device (an engine of several
tensor ranks on several).
"""

import gc
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")
_BETWEEN = "post_attention_layernorm"
_ROUTER = re.compile(r"(?:^|\.)layers\.(\d+)\..*\b(?:gate|router)$")
_EMBEDDING = re.compile(r"(?:^|\.)embed_tokens$")
_FILE = "MRL_LAYER_STATES"  # where the first worker of an engine writes what it keeps


class KeptStates:
    """Keeps what modules give, by hooks, of one forward pass after the other."""

    def __init__(self, model: nn.Module, experts: int) -> None:
        """`experts`: of each router; 0: there are none."""
        self._parts: dict[str, list[np.ndarray]] = {}
        self._hooks = []
        for name, module in model.named_modules():
            if layer := _LAYER.search(name):
                self._hooks.append(module.register_forward_hook(self._keeping(f"layer.{layer[1]}", _stream)))
                if between := getattr(module, _BETWEEN, None):
                    self._hooks.append(between.register_forward_hook(self._between(f"attention.{layer[1]}")))
            elif (router := _ROUTER.search(name)) and experts:
                of_router = lambda given: _logits(given, experts)  # noqa: E731
                self._hooks.append(module.register_forward_hook(self._keeping(f"router.{router[1]}", of_router)))
            elif _EMBEDDING.search(name):
                self._hooks.append(module.register_forward_hook(self._keeping("embedded", _stream)))

    def _keeping(self, key: str, of: Callable[[Any], Tensor | None]) -> Callable[..., None]:
        def keep(module: nn.Module, given: Any, answer: Any) -> None:
            self._keep(key, of(answer))

        return keep

    def _between(self, key: str) -> Callable[..., None]:
        def keep(module: nn.Module, given: Any, answer: Any) -> None:
            # vLLM's norm adds what it is given to the stream and returns both; transformers' is given the stream
            self._keep(key, answer[1] if isinstance(answer, tuple) else given[0])

        return keep

    def _keep(self, key: str, value: Tensor | None) -> None:
        if value is not None:
            part = value.detach().float().cpu().reshape(-1, value.shape[-1]).numpy().copy()
            self._parts.setdefault(key, []).append(part)

    def taken(self) -> dict[str, np.ndarray]:
        """Takes the hooks away, and returns what they kept."""
        for hook in self._hooks:
            hook.remove()
        return {key: np.concatenate(parts) for key, parts in self._parts.items()}


def _stream(answer: Any) -> Tensor:
    """Returns the residual stream: vLLM's layers return what they add beside what they add it to."""
    if not isinstance(answer, tuple):
        return answer
    if len(answer) == 2 and isinstance(answer[1], Tensor) and answer[0].shape == answer[1].shape:
        return answer[0] + answer[1]
    return answer[0]


def _logits(answer: Any, experts: int) -> Tensor | None:
    """Returns a router's logits, which transformers' routers return among other things, or a linear alone."""
    of_all = answer if isinstance(answer, tuple) else (answer,)
    return next((each for each in of_all if isinstance(each, Tensor) and each.shape[-1] == experts), None)


class LayersExtension:
    """What workers of the engine are told by name."""

    def keep_states(self, experts: int) -> None:
        """Begins to keep what the layers give."""
        self.kept_states = KeptStates(self.model_runner.model, experts)

    def write_states(self) -> None:
        """Writes what was kept, on the first worker, and ends it. All workers have the whole stream."""
        found = self.kept_states.taken()
        if self.rank == 0:
            np.savez(os.environ[_FILE], **found)


def of_transformers(job: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Computes the rows with transformers' class. In float32 where it fits, since ranks and engines round less than
    transformers' routers do in the dtype of the weights.
    """
    from transformers import AutoModelForCausalLM

    from mrl.platforms import get_platform

    device = get_platform(job["device"]).device

    def loaded(dtype: torch.dtype) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype, attn_implementation="eager").to(device)

    try:
        model = loaded(torch.float32)
    except torch.OutOfMemoryError:
        model = loaded(getattr(torch, job["dtype"]))
    model.eval()

    def log_probs(row: Sequence[int]) -> list[np.ndarray]:
        ids = torch.tensor([row], device=device)
        logits = model(ids, use_cache=False).logits[0, :-1].float()
        hotter = (logits / temperature for temperature in (1.0, job["temperature"]))
        return [each.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].cpu().numpy() for each in hotter]

    found = {}
    with torch.no_grad():
        for number, row in enumerate(job["rows"]):
            found[f"row.{number}"], found[f"sampled.{number}"] = log_probs(row)
        kept = KeptStates(model, job["experts"])
        for row in job["rows"][: job["watched"]]:
            log_probs(row)
    return found | kept.taken()


def of_engine(job: Mapping[str, Any], folder: Path) -> dict[str, np.ndarray]:
    """Computes the rows as prompts of a fresh engine."""
    from vllm import LLM, SamplingParams

    states = folder / "states.npz"
    os.environ[_FILE] = str(states)
    engine = LLM(**job["arguments"], worker_extension_cls=f"{__spec__.name}.LayersExtension")
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=1.0, detokenize=False)

    def log_probs(rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
        answers = engine.generate([{"prompt_token_ids": list(row)} for row in rows], asked, use_tqdm=False)
        return [
            np.array([of[token].logprob for of, token in zip(told.prompt_logprobs[1:], row[1:], strict=True)])
            for told, row in zip(answers, rows, strict=True)
        ]

    found = {f"row.{number}": values for number, values in enumerate(log_probs(job["rows"]))}
    engine.collective_rpc("keep_states", args=(job["experts"],))
    for row in job["rows"][: job["watched"]]:
        log_probs([row])
    engine.collective_rpc("write_states")
    with np.load(states, allow_pickle=False) as kept:
        return found | dict(kept)


def main(file: Path) -> None:
    """Computes both sides, one after the other."""
    job = json.loads(file.read_text(encoding="utf-8"))
    np.savez(file.with_name(f"{job['out']}.transformers.npz"), **of_transformers(job))
    gc.collect()
    np.savez(file.with_name(f"{job['out']}.vllm.npz"), **of_engine(job, file.parent))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
