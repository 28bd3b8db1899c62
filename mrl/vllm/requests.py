"""Requests to and answers from an engine: plain data that crosses process borders."""

from dataclasses import dataclass, field

import numpy as np

from mrl.data.routes import RouteShape


@dataclass(frozen=True)
class Request:
    """One response to sample. The seed alone decides its random numbers, so order of arrival changes nothing."""

    sample_id: int
    prompt_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Sampling:
    """Sampling of all requests of one call; every parameter is explicit, none comes from the model's own files."""

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = -1
    routes: bool = False  # completions bring the experts that the routers chose


@dataclass(frozen=True)
class Completion:
    """One sampled response."""

    sample_id: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]  # processed: after temperature, one per token
    stop_reason: str  # "stop" or "length"
    weight_version: int
    routes: np.ndarray | None = field(default=None, compare=False, repr=False)  # of prompt and response, see mrl.data.routes


@dataclass(frozen=True)
class EngineSettings:
    """Everything one engine is started with."""

    engine_id: int
    arguments: dict  # of vLLM's AsyncEngineArgs
    check_order: bool  # run the start-up check that batch composition changes no bit
    vocab_size: int
    expected: tuple[tuple[str, tuple[int, ...]], ...]  # HF name and shape of every tensor that a weight update has to bring
    segments_file: str  # where the engine notes its shared memory, so that its successor can clean up after a kill
    routes: RouteShape | None = None  # what is asked of it when `Sampling.routes`; None: a model without experts
    captures_routes: bool = False  # vLLM returns none on this device: mrl's worker extension collects them

    @property
    def workers(self) -> int:
        """Processes below this engine that hold weights."""
        return self.arguments.get("tensor_parallel_size", 1) * self.arguments.get("data_parallel_size_local", 1)
