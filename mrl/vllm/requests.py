"""What an engine is started with and what it is asked: plain data for other processes, from the configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from mrl.config.places import rollout_layout
from mrl.config.schema import ActorConfig, DataConfig, RewardConfig, RolloutConfig, RunConfig
from mrl.config.schema_rollout import AgentConfig, TurnsConfig
from mrl.data.dataset import THINKING
from mrl.data.routes import RouteShape
from mrl.environments.tool import ToolsSpec, TurnsSpec
from mrl.model import ModelSpec, load_model_spec
from mrl.model.hf_config import QUANTIZATION
from mrl.model.quantised import engine_quantisation, with_scales
from mrl.model.registry import family_of, own_config
from mrl.plain_files import TEXT_BYTES, read_settings
from mrl.platforms.hosting import CPU_WORKER, Hosting, get_hosting
from mrl.reward.builtin_rules import ENVIRONMENT
from mrl.vllm.engine_state import AWAITED

_RANDOM = "dummy"  # vLLM's own load format for weights of nobody


@dataclass(frozen=True)
class Request:
    """One response to sample. The seed alone decides its random numbers, so order of arrival changes nothing."""

    sample_id: int
    prompt_ids: tuple[int, ...]
    seed: int
    prompt_id: int = 0  # these two are handed on to the response; see Sample
    group_id: int = 0
    max_tokens: int | None = None  # fewer than those of `Sampling`
    handle: int | None = None  # by which the engine that has it can be told to end it
    row: Mapping[str, Any] | None = None  # of the data, where its response acts on what the row names


@dataclass(frozen=True)
class Sampling:
    """Sampling of all requests of one call; every parameter is explicit, none comes from the model's own files."""

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = -1
    routes: bool = False  # responses bring the experts that the routers chose


@dataclass(frozen=True)
class EngineReading:
    """An engine's meters."""

    tokens: int  # of responses, made since it was started: while it has requests and this stands, so does the engine
    cache_share: float = 0.0  # of the KV cache's blocks that are in use now
    cache_peak: float = 0.0  # the highest of that under the weights that it serves
    preemptions: int = 0  # since it was started
    all_act: bool = False  # all responses that it has wait for tools or environments: there is no token to make


class VersionServed(NamedTuple):
    """Counts of a version of the weights, in one engine or in all."""

    stale_tokens: int  # that prefix caches gave its requests and other weights had computed: 0; see VllmEngine.commit
    cache_peak: float  # share of the KV cache, in the fullest engine
    preemptions: int  # since the engines were started


@dataclass(frozen=True)
class EngineSettings:
    """What one engine is started with, or one data-parallel rank of it: each has a front end of its own."""

    engine_id: int
    arguments: dict  # of vLLM's AsyncEngineArgs
    check_order: bool  # run the start-up check that batch composition changes no bit
    vocab_size: int
    # HF name and shape of every tensor that a weight update has to bring
    expected: tuple[tuple[str, tuple[int, ...]], ...]
    segments_file: str  # where the engine notes its shared memory, so that its successor can clean up after a kill
    routes: RouteShape | None = None  # what is asked of it when `Sampling.routes`; None: a model without experts
    captures_routes: bool = False  # vLLM returns none on this device: mrl's worker extension collects them
    data_rank: int = 0  # among the engine's data-parallel ranks
    turns: TurnsSpec | None = None  # responses are conversations with tools

    @property
    def workers(self) -> int:
        """Processes below this front end that hold weights."""
        return self.arguments["tensor_parallel_size"]

    @property
    def awaits_weights(self) -> bool:
        """Whether it starts without weights of anybody, also where the user asked vLLM itself for that."""
        return self.arguments.get("load_format") in (AWAITED, _RANDOM)

    @property
    def is_on_cpu(self) -> bool:
        """Whether its workers are the CPU's."""
        return self.arguments.get("worker_cls") == CPU_WORKER

    @property
    def data_ranks(self) -> int:
        """Front ends of the engine, whose experts compute together."""
        return self.arguments.get("data_parallel_size", 1)

    @property
    def positions(self) -> range:
        """Positions of its workers among all of the engine, as SyncSetup.worker counts them."""
        return range(self.data_rank * self.workers, (self.data_rank + 1) * self.workers)

    @property
    def name(self) -> str:
        """The name that messages have for it."""
        return rank_name(self.engine_id, self.data_rank, self.data_ranks)


def rank_name(engine: int, rank: int, ranks: int) -> str:
    """`engine 1`, or `engine 1 rank 0` where an engine has several data-parallel ranks."""
    if ranks > 1:
        return f"engine {engine} rank {rank}"
    return f"engine {engine}"


def engine_of(name: str) -> str:
    """The engine of a rank that `rank_name` names: all of an engine fall and rise together."""
    return name.split(" rank ")[0]


def log_name(name: str) -> str:
    """The name of a rank's file in logs/, without an ending: `engine-1-rank-0`."""
    return name.replace(" ", "-")


def engine_settings(
    config: RunConfig, engine_id: int, logs: Path, data_rank: int = 0, by_sync: bool = False
) -> EngineSettings:
    """Settings of one engine, or of one data-parallel rank of it. `logs` is the run's folder for logs; `by_sync`: it
    loads no weights, which a sync brings.

    A `load_format` of the user's own is taken as it is.
    """
    hosting = get_hosting(config.cluster.device)
    model = load_model_spec(config.model.path)
    name = rank_name(engine_id, data_rank, config.rollout.data_parallel_size)
    loading = {}
    if by_sync:
        loading = {"load_format": AWAITED}
    return EngineSettings(
        engine_id=engine_id,
        data_rank=data_rank,
        arguments=loading
        | _of_model(model, config.cluster.device, config.rollout.fp8_block)
        | _arguments(config, hosting, data_rank),
        check_order=hosting.checks_batch_order,
        vocab_size=model.vocab_size,
        expected=tuple((tensor.name, tensor.shape) for tensor in with_scales(model, config.rollout.fp8_block)),
        segments_file=str(logs / f"{log_name(name)}.segments"),
        routes=RouteShape.of(model) if model.is_moe else None,
        captures_routes=_wants_routes(config.actor) and not hosting.returns_routes,
        turns=_rewarded(turns_spec(config.rollout.turns, config.data, config.rollout.agent), config.reward),
    )


def _rewarded(turns: TurnsSpec | None, reward: RewardConfig) -> TurnsSpec | None:
    """The spec that knows whether an agent has to give the reward."""
    if turns is None:
        return None
    return replace(turns, needs_reward=reward.custom_reward_function is None and reward.function == ENVIRONMENT)


_OF_FILES = ("path", "index", "tool_config_path")


def turns_spec(turns: TurnsConfig | None, data: DataConfig, agent: AgentConfig | None = None) -> TurnsSpec | None:
    """What conversations may do; None where responses are of one turn."""
    if turns is None:
        return None
    path = None
    if turns.path is not None:
        path = str(Path(turns.path).resolve())
    index = None
    if turns.index is not None:
        index = str(Path(turns.index).resolve())
    tool_config = None
    if turns.tool_config_path is not None:
        tool_config = str(Path(turns.tool_config_path).resolve())
    of_processes = turns.model_dump(include={"max_memory_gib", "environment", "network", "environments"})
    given = turns.model_dump(exclude={*_OF_FILES, "tools", "folders", "python", *of_processes})
    thinking = {}
    if data.enable_thinking is not None:
        thinking = {THINKING: data.enable_thinking}
    folders = tuple(str(Path(folder).resolve()) for folder in turns.folders)
    python = turns.python.model_dump()
    tools = ToolsSpec(tuple(turns.tools), path, index=index, folders=folders, python=python, **of_processes)
    tools = replace(tools, tool_config=tool_config)
    if agent is not None:
        tools = replace(tools, **_of_agent(agent))
    arguments = {**data.apply_chat_template_kwargs, **thinking}
    return TurnsSpec(tools, **given, template_arguments=arguments, max_prompt_length=data.max_prompt_length)


def _of_agent(agent: AgentConfig) -> dict[str, Any]:
    if agent.path is None:
        return {"command": agent.command}
    return {"path": str(Path(agent.path).resolve()), "agent": agent.name}


def _arguments(config: RunConfig, hosting: Hosting, data_rank: int) -> dict[str, Any]:
    """Arguments of AsyncEngineArgs; `rollout.engine_kwargs.vllm` adds to them and wins."""
    rollout = config.rollout
    layout = rollout_layout(config.rollout)
    max_model_len = config.data.max_prompt_length + config.data.max_response_length
    optional = {
        "enforce_eager": rollout.enforce_eager,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
    }
    arguments: dict[str, Any] = {
        "model": config.model.path,
        "dtype": config.rollout_dtype,
        "seed": config.trainer.seed,
        "max_model_len": max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "generation_config": "vllm",  # never the sampling defaults that a model's folder brings along
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "trust_remote_code": False,
        "tensor_parallel_size": layout.tensor,
        "enable_expert_parallel": layout.expert > 1,
        # named, since inside a Ray actor vLLM would choose Ray workers of its own
        "distributed_executor_backend": "mp",
        **{name: value for name, value in optional.items() if value is not None},
        **hosting.engine_arguments(
            max_model_len, rollout.max_num_batched_tokens, config.cluster.placement == "colocated"
        ),
    }
    if layout.data > 1:  # a front end each, known to vLLM as external load balancing: requests are spread by us
        arguments |= {"data_parallel_size": layout.data, "data_parallel_rank": data_rank}
    if rollout.fp8_block and hosting.fp8_backend:
        arguments["linear_backend"] = hosting.fp8_backend
    if _wants_routes(config.actor) and hosting.returns_routes:
        arguments["enable_return_routed_experts"] = True
    return arguments | rollout.engine_kwargs.get("vllm", {})


def _of_model(model: ModelSpec, device: str, fp8_block: int = 0) -> dict[str, Any]:
    """Arguments that follow from the model, and from the size of a block of words where engines hold such.

    vLLM has two kernels of latent attention on CPU, and takes one that keeps weights in a form of its own where it can.
    Of a checkpoint in FP8 an engine is the bfloat16 model that is trained, and of one that also reads images the text
    model: it gets its weights by a sync alone. So does one that holds words, for no file has them.
    """
    keys = family_of(model).engine_keys(model)
    if model.is_fp8:
        keys = keys | {QUANTIZATION: None}
    if fp8_block:
        keys = keys | {QUANTIZATION: engine_quantisation(model, fp8_block)}
    arguments: dict[str, Any] = {"hf_overrides": keys} if keys else {}
    if model.loads_by_sync or fp8_block:
        arguments["load_format"] = AWAITED
    if model.is_latent and device == "cpu":
        arguments["attention_backend"] = "CPU_MLA"
    return arguments


def _wants_routes(actor: ActorConfig) -> bool:
    return actor.router_replay == "R3"


def training_sampling(rollout: RolloutConfig, data: DataConfig, actor: ActorConfig, model_path: str) -> Sampling:
    """How training responses are sampled: on the whole distribution, so that log-probs mean the same on both sides."""
    return Sampling(
        temperature=rollout.temperature,
        max_tokens=data.max_response_length,
        stop_token_ids=stop_token_ids(model_path),
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        routes=_wants_routes(actor),
    )


def validation_sampling(rollout: RolloutConfig, data: DataConfig, model_path: str) -> Sampling:
    """How validation responses are sampled."""
    val = rollout.val_kwargs
    return Sampling(val.temperature, data.max_response_length, stop_token_ids(model_path), val.top_p, val.top_k)


def stop_token_ids(model_path: str) -> tuple[int, ...]:
    """End-of-sequence ids of the model: those of config.json and of generation_config.json (a list in Qwen3) together.

    vLLM reads the second only when it also takes the model's sampling defaults, which training must not.
    """
    stop_ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = Path(model_path) / name
        if path.exists():
            ids = own_config(read_settings(path, TEXT_BYTES)).get("eos_token_id")
            stop_ids |= set(ids if isinstance(ids, list) else [ids] if ids is not None else [])
    return tuple(sorted(stop_ids))
