"""Requests to engines and their settings, made from the configuration: plain data for other processes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from mrl.acting.tool import ToolsSpec, TurnsSpec
from mrl.config.deployment import image_store, rollout_layout
from mrl.config.schema import ActorConfig, DataConfig, RolloutConfig, RunConfig
from mrl.config.schema_rollout import MTP, NGRAM, AgentConfig, SpeculationConfig, TurnsConfig
from mrl.config.speculation_rules import draft_positions
from mrl.data.dataset import THINKING
from mrl.data.routes import RouteShape
from mrl.data.samples import ImageStore, RowImage
from mrl.engine.engine_state import AWAITED, SYNCS_TOWER, TEXT_FOLDER
from mrl.model import ModelSpec, read_hf_config
from mrl.model.hf_config import QUANTIZATION
from mrl.model.quantised import engine_quantisation, with_scales
from mrl.model.registry import family_of, positions_of, stop_token_ids
from mrl.platforms.hosting import CPU_WORKER, Hosting, get_hosting
from mrl.reward.builtin_rules import ENVIRONMENT

_RANDOM = "dummy"  # vLLM's own load format for random weights
# Arguments of engines that see images: each worker has the whole tower, so that its numbers do not depend on the tensor
# degree, and images are processed already (seeing_models.py). vLLM would otherwise scale pixels again on the device,
# where a folder has a preprocessor_config.json.
_SEEING = {
    "mm_encoder_tp_mode": "data",
    "mm_processor_cache_gb": 0,
    "mm_device_do_normalize": False,
    "skip_mm_profiling": True,
}
_LONGEST_LOOKUP = 5  # vLLM's own default of prompt_lookup_max


@dataclass(frozen=True)
class Request:
    """One response to sample. Only the seed decides its random numbers, so the order of arrival changes nothing."""

    sample_id: int
    prompt_ids: tuple[int, ...]
    seed: int
    prompt_id: int = 0  # these two are copied to the response (Sample)
    group_id: int = 0
    max_tokens: int | None = None  # a lower limit than that of `Sampling`
    handle: int | None = None  # the engine can be told to end the request by this number
    row: Mapping[str, Any] | None = None  # the row of the data, where the response calls tools or environments of it
    images: tuple[RowImage, ...] = ()  # whose tokens are among `prompt_ids`


@dataclass(frozen=True)
class Sampling:
    """Sampling of all requests of one call. Every parameter is explicit; none comes from the model's own files."""

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = -1
    routes: bool = False  # responses contain the experts that the routers chose
    in_one_turn: bool = False  # whatever rollout.turns says: no tools, environments or agents


@dataclass(frozen=True)
class EngineReading:
    """An engine's meters."""

    tokens: int  # tokens of responses made since its start; an engine with requests whose number stays still hangs
    cache_share: float = 0.0  # share of the KV cache's blocks in use now
    cache_peak: float = 0.0  # highest share under the weights that it serves
    preemptions: int = 0  # since it was started
    all_act: bool = False  # all its responses wait for tools or environments, so it has no token to make


@dataclass(frozen=True)
class DraftCounts:
    """What speculation did: counts over the requests of all engine steps."""

    steps: int = 0  # of a request with drafted tokens; each gives one token more than it accepts
    drafted: tuple[int, ...] = ()  # tokens, by their position in a draft
    accepted: tuple[int, ...] = ()
    decoded: int = 0  # decode steps of a request, with and without drafted tokens

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return DraftCounts(
            self.steps + other.steps,
            tuple(map(sum, zip_longest(self.drafted, other.drafted, fillvalue=0))),
            tuple(map(sum, zip_longest(self.accepted, other.accepted, fillvalue=0))),
            self.decoded + other.decoded,
        )

    def metrics(self) -> dict[str, float]:
        """Returns metrics of these steps; empty where nothing was drafted."""
        if not self.steps:
            return {}
        at = {
            f"drafts/acceptance_at/{number}": accepted / drafted
            for number, (drafted, accepted) in enumerate(zip(self.drafted, self.accepted, strict=True), 1)
            if drafted
        }
        accepted = sum(self.accepted)
        return {
            "drafts/tokens": float(sum(self.drafted)),
            "drafts/acceptance": accepted / sum(self.drafted),
            "drafts/tokens_per_step": 1 + accepted / self.steps,
            "drafts/step_share": self.steps / max(self.decoded, self.steps),
            **at,
        }


class VersionServed(NamedTuple):
    """Counts of one version of the weights, in one engine or in all."""

    stale_tokens: int  # tokens from prefix caches that other weights had computed; should be 0 (CachedPrefixes)
    cache_peak: float  # share of the KV cache, in the fullest engine
    preemptions: int  # since the engines were started
    drafts: DraftCounts = DraftCounts()


@dataclass(frozen=True)
class EngineSettings:
    """Settings of one engine, or of one of its data-parallel ranks, each of which has its own front end."""

    engine_id: int
    arguments: dict  # of vLLM's AsyncEngineArgs
    check_order: bool  # check at the start that the order of a batch changes no bit
    vocab_size: int
    # HF name and shape of every tensor that a weight update has to bring
    expected: tuple[tuple[str, tuple[int, ...]], ...]
    segments_file: str  # the engine notes its shared memory here, so that the next one can clean up after a kill
    routes: RouteShape | None = None  # shape of its routes, returned for `Sampling.routes`; None: no experts
    captures_routes: bool = False  # mrl's worker extension collects routes, since vLLM returns none on this device
    data_rank: int = 0  # among the engine's data-parallel ranks
    turns: TurnsSpec | None = None  # responses are conversations with tools
    images: ImageStore | None = None  # images of prompts; None: the engine sees none

    @property
    def workers(self) -> int:
        """Processes below this front end that hold weights."""
        return self.arguments["tensor_parallel_size"]

    @property
    def awaits_weights(self) -> bool:
        """Whether it starts with placeholder weights, also where the user's own load format makes vLLM do so."""
        reads_files = TEXT_FOLDER in self.arguments.get("model_loader_extra_config", {})
        return self.arguments.get("load_format") in (AWAITED, _RANDOM) and not reads_files

    def reading_from(self, text: Path, images: Path) -> "EngineSettings":
        """Returns the settings of an engine that sees, with the text model's weights from the folder `text` and not by
        a sync, and with prompts' images from the folder `images`.
        """
        loading = {"model_loader_extra_config": {TEXT_FOLDER: str(text)}}
        store = replace(self.images, folder=str(images))
        return replace(self, arguments=self.arguments | loading, images=store)

    @property
    def syncs_tower(self) -> bool:
        """Whether weight syncs bring the vision tower, too."""
        return bool(self.arguments.get("hf_overrides", {}).get(SYNCS_TOWER))

    @property
    def speculates(self) -> bool:
        """Whether tokens are drafted."""
        return self.arguments.get("speculative_config") is not None

    @property
    def drafts_with_model(self) -> bool:
        """Whether layers of the model for multi-token prediction draft."""
        return self.speculates and self.arguments["speculative_config"]["method"] == MTP

    @property
    def is_on_cpu(self) -> bool:
        """Whether its workers run on the CPU."""
        return self.arguments.get("worker_cls") == CPU_WORKER

    @property
    def data_ranks(self) -> int:
        """Data-parallel ranks of the engine; each has a front end."""
        return self.arguments.get("data_parallel_size", 1)

    @property
    def positions(self) -> range:
        """Positions of its workers among all workers of the engine, as SyncSetup.worker counts them."""
        return range(self.data_rank * self.workers, (self.data_rank + 1) * self.workers)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return rank_name(self.engine_id, self.data_rank, self.data_ranks)


def rank_name(engine: int, rank: int, ranks: int) -> str:
    """Returns `engine 1`, or `engine 1 rank 0` where an engine has several data-parallel ranks."""
    if ranks > 1:
        return f"engine {engine} rank {rank}"
    return f"engine {engine}"


def engine_of(name: str) -> str:
    """Returns the engine's name from that of a rank. All ranks of an engine stop and start together."""
    return name.split(" rank ")[0]


def log_name(name: str) -> str:
    """Returns the name of a rank's file in logs/, without its ending: `engine-1-rank-0`."""
    return name.replace(" ", "-")


def engine_settings(
    config: RunConfig, model: ModelSpec, engine_id: int, logs: Path, data_rank: int = 0, by_sync: bool = False
) -> EngineSettings:
    """Returns the settings of one engine, or of one of its data-parallel ranks.

    `logs` is the run's folder for logs. With `by_sync` the engine loads no weights, because a sync brings them. A
    `load_format` of the user's own stays.
    """
    hosting = get_hosting(config.cluster.device)
    name = rank_name(engine_id, data_rank, config.rollout.data_parallel_size)
    loading = {}
    if by_sync:
        loading = {"load_format": AWAITED}
    of_model = _of_model(model, config.cluster.device, config.rollout.fp8_block, config.model.vision is not None)
    if config.model.max_position_embeddings is not None:
        positions = positions_of(read_hf_config(config.model.path), config.model.max_position_embeddings)
        of_model["hf_overrides"] = of_model.get("hf_overrides", {}) | positions
    arguments = loading | of_model | _arguments(config, hosting, data_rank)
    if config.rollout.drafts_with_model:  # a sync brings the predicting layers with the rest
        form = AWAITED if arguments.get("load_format") == AWAITED else "auto"
        arguments["speculative_config"]["draft_load_config"] = {"load_format": form}
    return EngineSettings(
        engine_id=engine_id,
        data_rank=data_rank,
        arguments=arguments,
        check_order=hosting.checks_batch_order,
        vocab_size=model.vocab_size,
        expected=tuple((tensor.name, tensor.shape) for tensor in with_scales(model, config.rollout.fp8_block)),
        segments_file=str(logs / f"{log_name(name)}.segments"),
        routes=RouteShape.of(model) if model.is_moe else None,
        captures_routes=_wants_routes(config.actor) and not hosting.returns_routes,
        turns=_turns_of(config),
        images=image_store(config, logs.parent),
    )


def _turns_of(config: RunConfig) -> TurnsSpec | None:
    """Returns `turns_spec`, with whether an agent has to give the reward, and whether the model reads images."""
    turns = turns_spec(config.rollout.turns, config.data, config.rollout.agent)
    if turns is None:
        return None
    reward = config.reward
    needs_reward = reward.custom_reward_function is None and reward.function == ENVIRONMENT
    tools = replace(turns.tools, sees=config.model.vision is not None)
    return replace(turns, tools=tools, needs_reward=needs_reward)


_OF_FILES = ("path", "index", "tool_config_path")


def turns_spec(turns: TurnsConfig | None, data: DataConfig, agent: AgentConfig | None = None) -> TurnsSpec | None:
    """Returns what conversations may do; None where responses have one turn."""
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
    of_processes = turns.model_dump(include={"max_memory_gib", "environment", "network", "environments", "mcp_servers"})
    given = turns.model_dump(exclude={*_OF_FILES, "tools", "folders", "python", "sandbox", *of_processes})
    thinking = {}
    if data.enable_thinking is not None:
        thinking = {THINKING: data.enable_thinking}
    folders = tuple(str(Path(folder).resolve()) for folder in turns.folders)
    python = turns.python.model_dump()
    tools = ToolsSpec(tuple(turns.tools), path, index=index, folders=folders, python=python, **of_processes)
    tools = replace(tools, tool_config=tool_config, sandbox=turns.sandbox and turns.sandbox.model_dump())
    if agent is not None:
        tools = replace(tools, **_of_agent(agent))
        given |= agent.model_dump(include={"max_requests", "keeps_all_answers", "enforces_tool_choice"})
    arguments = {**data.template_arguments, **thinking}
    return TurnsSpec(tools, **given, template_arguments=arguments, max_prompt_length=data.max_prompt_length)


def _of_agent(agent: AgentConfig) -> dict[str, Any]:
    if agent.path is None:
        return agent.model_dump(include={"command", "harness", "program", "arguments", "harness_config", "in_sandbox"})
    return {"path": str(Path(agent.path).resolve()), "agent": agent.name}


def _arguments(config: RunConfig, hosting: Hosting, data_rank: int) -> dict[str, Any]:
    """Returns arguments of AsyncEngineArgs. `rollout.engine_kwargs.vllm` adds to them and wins."""
    rollout = config.rollout
    layout = rollout_layout(config.rollout)
    max_model_len = config.data.max_prompt_length + config.data.max_response_length + draft_positions(rollout)
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
        "generation_config": "vllm",  # never the sampling defaults in a model's folder
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "trust_remote_code": False,
        "tensor_parallel_size": layout.tensor,
        "enable_expert_parallel": layout.expert > 1,
        # set here, because inside a Ray actor vLLM would choose its own Ray workers
        "distributed_executor_backend": "mp",
        **{name: value for name, value in optional.items() if value is not None},
        **hosting.engine_arguments(
            max_model_len, rollout.max_num_batched_tokens, config.cluster.placement == "colocated"
        ),
    }
    if layout.data > 1:  # a front end for each rank, vLLM's external load balancing: mrl distributes the requests
        arguments |= {"data_parallel_size": layout.data, "data_parallel_rank": data_rank}
    if rollout.fp8_block and hosting.fp8_backend:
        arguments["linear_backend"] = hosting.fp8_backend
    if _wants_routes(config.actor) and hosting.returns_routes:
        arguments["enable_return_routed_experts"] = True
    if rollout.speculation is not None:
        arguments["speculative_config"] = _drafting(rollout.speculation, rollout.max_num_seqs, hosting, layout.data)
        if layout.data > 1 and hosting.checks_batch_order:
            arguments["scheduler_cls"] = SCHEDULER
    return arguments | rollout.engine_kwargs.get("vllm", {})


EAGLE = "eagle3"  # vLLM's name of the method by which heads draft
SCHEDULER = "mrl.engine.drafting_scheduler.DraftingScheduler"


def _drafting(speculation: SpeculationConfig, most_sequences: int, hosting: Hosting, ranks: int) -> dict[str, Any]:
    """Returns vLLM's argument speculative_config. For ngram the longest earlier occurrence counts, up to five tokens.

    For the sake of captured graphs vLLM gives a new request of one token drafts that are always rejected, where others
    are decoded. They take random numbers, so its tokens would depend on the others. It does not with a schedule of
    drafts by batch size. The schedule ends drafts in batches of more than `speculation.max_num_seqs` requests. Engines
    with several data-parallel `ranks` have none (drafting_scheduler.py).
    """
    schedule = {}
    drafting = speculation.max_num_seqs or most_sequences
    if ranks == 1 and (hosting.checks_batch_order or drafting < most_sequences):
        sizes = [(1, drafting, speculation.tokens), (drafting + 1, most_sequences, 0)]
        schedule = {"num_speculative_tokens_per_batch_size": sizes[: 1 + (drafting < most_sequences)]}
    if speculation.method != NGRAM:
        drafting = {"method": speculation.method, "draft_sample_method": speculation.draft_sample_method}
        if speculation.head is not None:  # no sync brings it, and no pickled file is read
            loading = {"draft_load_config": {"load_format": "safetensors"}}
            drafting |= {"method": EAGLE, "model": str(speculation.head)} | loading
        return schedule | drafting | {"num_speculative_tokens": speculation.tokens}
    return schedule | {
        "method": speculation.method,
        "num_speculative_tokens": speculation.tokens,
        "prompt_lookup_min": speculation.lookup,
        "prompt_lookup_max": max(speculation.lookup, _LONGEST_LOOKUP),
    }


def _of_model(model: ModelSpec, device: str, fp8_block: int = 0, sees: bool = False) -> dict[str, Any]:
    """Returns arguments that follow from the model, and from the size of an FP8 block where engines hold words.

    On CPU vLLM has two kernels of latent attention, and prefers one with a weight layout of its own. The engine of an
    FP8 checkpoint is the bfloat16 model that is trained. The engine of a model that also reads images is the text
    model, unless it `sees`. Both get their weights only by a sync. So does an engine that holds words, because no file
    has them.
    """
    family = family_of(model)
    keys = family.engine_keys(model)
    if sees:
        keys = keys | {"architectures": [family.seeing]}
    if model.trained_tower is not None:
        keys = keys | {SYNCS_TOWER: True}
    if model.is_quantised:
        keys = keys | {QUANTIZATION: None}
    if fp8_block:
        keys = keys | {QUANTIZATION: engine_quantisation(model, fp8_block, sees)}
    arguments: dict[str, Any] = {"hf_overrides": keys} if keys else {}
    if model.loads_by_sync or fp8_block:
        arguments["load_format"] = AWAITED
    if model.is_latent and device == "cpu":
        arguments["attention_backend"] = "CPU_MLA"
    if sees:
        arguments |= _SEEING
    return arguments


def _wants_routes(actor: ActorConfig) -> bool:
    return actor.router_replay == "R3"


def training_sampling(rollout: RolloutConfig, data: DataConfig, actor: ActorConfig, model_path: str) -> Sampling:
    """Returns how training responses are sampled: from the whole distribution, so that log-probs mean the same on both
    sides.
    """
    return Sampling(
        temperature=rollout.temperature,
        max_tokens=data.max_response_length,
        stop_token_ids=stop_token_ids(model_path),
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        routes=_wants_routes(actor),
    )


def validation_sampling(rollout: RolloutConfig, data: DataConfig, model_path: str) -> Sampling:
    """Returns how validation responses are sampled."""
    val = rollout.val_kwargs
    return Sampling(val.temperature, data.max_response_length, stop_token_ids(model_path), val.top_p, val.top_k)
