"""Rules of rollout engines: their layout on model and cluster, limits of vLLM's CPU build, and the weight sync."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mrl.config.deployment import Deployment
from mrl.config.rule_row import RuleRow, on_only_where
from mrl.config.schema import AlgorithmConfig, RolloutConfig, RunConfig, leaf
from mrl.errors import ConfigError, Violation, nearest
from mrl.model import ModelSpec, read_hf_config
from mrl.model.device_grid import ClusterShape, engine_devices
from mrl.model.layout import RolloutLayout
from mrl.model.registry import family_of, own_config
from mrl.platforms.hosting import get_hosting
from mrl.platforms.tuned_experts import lacking, shape_of_worker
from mrl.reward.builtin_rules import ENVIRONMENT
from mrl.reward.confine import given_environment
from mrl.reward.items import ACC
from mrl.units import MOST_OF_A_NODE

_TP = "rollout.tensor_model_parallel_size"
_DP = "rollout.data_parallel_size"
_EP = "rollout.expert_parallel_size"
_TUNED = "rollout.tuned_experts"
_VLLM = "rollout.engine_kwargs.vllm"
_CPU_MULTIPLE = 32  # block size of vLLM's CPU kernels
_CPU_TENSOR = (1, 2)
_UNFILTERED = {"top_p": 1.0, "top_k": -1}
_RENORMALISED = (
    "a filter leaves words out and scales the rest up: the engine's log-probs are renormalised on the "
    "filtered set, training's are not"
)
# vLLM's argument -> its only legal value
_FIXED_EXPERTS = {"enable_eplb": False, "enable_elastic_ep": False, "expert_placement_strategy": "linear"}


def rollout_notes(config: RunConfig, model: ModelSpec) -> Iterator[str]:
    """Yields notes on bits that turns may change, on number formats that differ, and on idle devices."""
    if config.trainer.deterministic and config.rollout.turns is not None and not _on_cpu(config):
        yield (
            "trainer.deterministic: with rollout.turns the time of tools decides which responses an engine computes "
            "together, which outside cpu may change bits"
        )
    dtype = config.rollout_dtype
    trained = config.model.dtype
    if dtype != trained:
        yield (
            f"rollout.dtype {dtype} differs from model.dtype {trained}: generation and training "
            "compute other probabilities"
        )
    if trained != model.dtype:
        yield (
            f"model.dtype {trained} differs from the checkpoint's {model.dtype}: weights are "
            "converted when they are loaded"
        )
    if model.left_out_layers and not config.rollout.drafts_with_model:
        yield (
            f"model.path: {model.left_out_layers} multi-token prediction layers are neither trained nor used by "
            "engines; checkpoints and exports have them as they are"
        )
    for name, value in filters(config.rollout).items():
        yield (
            f"rollout.{name} {value:g}: {_RENORMALISED}. The loss reads only those of training (anchor: recompute), as "
            "verl's does; the mismatch metrics have the difference in them"
        )
    idle = cluster_devices(config) - Deployment.of(config).devices
    if idle > 0:
        yield f"{idle} of {cluster_devices(config)} devices are used by neither the actor nor an engine"


def reshard_notes(config: RunConfig) -> Iterator[str]:
    """Yields a note where the device does not have the given transport."""
    reach = get_hosting(config.cluster.device).memory_reach
    if config.reshard.transport == "ipc" and reach != "node":
        between = "no other"
        if reach == "process":
            between = "no"
        yield (
            f"reshard.transport ipc: a process of {config.cluster.device} can open {between} device's memory; weights "
            "go through shared memory of the host there"
        )


def cluster_devices(config: RunConfig) -> int:
    """Returns the number of devices of all nodes."""
    return config.cluster.nnodes * config.cluster.n_gpus_per_node


def engine_splits_heads(tensor: int, model: ModelSpec) -> bool:
    """Whether each of an engine's `tensor` workers computes whole heads.

    Several workers may share a key/value head, except in classes of vLLM that never repeat one.
    """
    heads = model.num_attention_heads
    kv = model.num_key_value_heads
    shared = tensor % kv == 0 and not family_of(model).vllm_divides_evenly
    return heads % tensor == 0 and (kv % tensor == 0 or shared)


def _layout(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    tp = config.rollout.tensor_model_parallel_size
    heads = model.num_attention_heads
    kv = model.num_key_value_heads
    if not engine_splits_heads(tp, model):
        rule = f"must divide num_attention_heads = {heads} and num_key_value_heads = {kv}"
        if not family_of(model).vllm_divides_evenly:
            rule = (
                f"must divide num_attention_heads = {heads}, and divide num_key_value_heads = {kv} or be a multiple "
                "of it"
            )
        legal = nearest(tp, heads, lambda v: engine_splits_heads(v, model))
        yield Violation(_TP, rule, "each worker computes whole heads", legal)


def _dense_layers(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    tp = config.rollout.tensor_model_parallel_size
    heads = model.num_attention_heads
    size = model.intermediate_size if len(model.moe_layers) < model.num_layers else 0
    if size % tp:
        legal = nearest(tp, heads, lambda v: size % v == 0)
        yield Violation(_TP, f"must divide intermediate_size = {size}", "projections are cut into equal slices", legal)


def _tuned_experts(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    folder = config.rollout.tuned_experts
    if folder is None:
        return
    if not model.is_moe or "moe_backend" not in get_hosting(config.cluster.device).engine_arguments(1, None):
        why = "its files are for vLLM's Triton kernel of fused experts on NVIDIA devices"
        yield Violation(_TUNED, f"must be null for {config.cluster.device} and this model", why, (None,))
        return
    rollout = config.rollout
    workers, ep = rollout.workers_per_engine, rollout.expert_parallel_size
    shape = shape_of_worker(model.num_experts, model.moe_intermediate_size, ep, workers)
    if Path(folder).is_dir() and (name := lacking(folder, *shape, rollout.quantization == "fp8")):
        why = "engines would take vLLM's own or its default without a word: python scripts/tune_experts.py CONFIG"
        yield Violation(_TUNED, f"has no file {name}, with the device's name in place of *", why)


def _experts(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    if not model.is_moe:
        return
    ep = config.rollout.expert_parallel_size
    workers = config.rollout.workers_per_engine
    if ep not in (1, workers):
        why = f"vLLM spreads experts over all workers of an engine (tensor x data = {workers}) or over none"
        allowed = tuple(sorted({1, workers}))
        yield Violation(_EP, f"must be {' or '.join(map(str, allowed))}", why, allowed)
    elif family_of(model).vllm_divides_evenly and model.num_experts % ep:
        count = model.num_experts
        legal = nearest(config.rollout.tensor_model_parallel_size, count, lambda v: count % v == 0)
        yield Violation(_EP, f"must divide num_experts = {count}", "vLLM's loader gives all workers as many", legal)
    elif model.moe_intermediate_size % (workers // ep):
        size = model.moe_intermediate_size
        data = config.rollout.data_parallel_size
        rule = f"times data_parallel_size = {data} must divide moe_intermediate_size = {size}"
        legal = nearest(config.rollout.tensor_model_parallel_size, size, lambda v: size % (v * data) == 0)
        yield Violation(
            _TP, rule, "without expert parallelism every expert is cut over all workers of an engine", legal
        )


def _cluster(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    have = cluster_devices(config)
    need = Deployment.of(config).devices
    rollout = config.rollout
    if need <= have:
        return
    actor = config.actor.layout.world_size
    engines = f"{rollout.num_engines} x {config.rollout.workers_per_engine}"
    how = (
        f"actor {actor} + engines {engines}"
        if config.cluster.placement == "separate"
        else f"the larger of actor {actor} and engines {engines}"
    )
    why = f"{how} = {need} devices, and {config.cluster.nnodes} x {config.cluster.n_gpus_per_node} = {have} are there"
    per_node = -(-need // config.cluster.nnodes)
    allowed = (per_node,) if per_node <= MOST_OF_A_NODE else ()
    yield Violation("cluster.n_gpus_per_node", f"times nnodes must be at least {need}", why, allowed)


def _placement(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """Checks that each engine, or each of its data-parallel ranks, fits on one node.

    It judges only clusters that have enough devices.
    """
    rollout = config.rollout
    cluster = ClusterShape(config.cluster.nnodes, config.cluster.n_gpus_per_node)
    tp = rollout.tensor_model_parallel_size
    dp = rollout.data_parallel_size
    deployment = Deployment.of(config)
    if config.cluster.device == "cpu" or deployment.devices > cluster.devices or tp > cluster.devices_per_node:
        return
    first = 0 if deployment.is_colocated else config.actor.layout.world_size

    def fault(engines: int) -> str:
        try:
            engine_devices(RolloutLayout(engines, tp, dp), cluster, first)
        except ConfigError as error:
            return str(error)
        return ""

    if why := fault(rollout.num_engines):
        allowed = nearest(rollout.num_engines, rollout.num_engines, lambda n: not fault(n))
        yield Violation("rollout.num_engines", "cannot be placed on the nodes", why, allowed)


def _nearest_degrees(config: RunConfig, is_legal: Callable[[int], bool]) -> tuple[int, ...]:
    """Returns legal tensor degrees of engines within a node that are nearest to the configured one."""
    return nearest(config.rollout.tensor_model_parallel_size, config.cluster.n_gpus_per_node, is_legal)


def _log_probs(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    if not config.rollout.calculate_log_probs:
        why = f"read by {', '.join(log_prob_readers(config))}; the engine computes them anyway"
        yield Violation("rollout.calculate_log_probs", "must be true", why, (True,))


def _fixed_experts(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    given = config.rollout.vllm_kwargs
    for name, legal in _FIXED_EXPERTS.items():
        if given.get(name, legal) != legal:
            why = "experts would move between workers, or be where the plan of the weight sync does not expect them"
            yield Violation(f"{_VLLM}.{name}", f"must be {str(legal).lower()}", why, (legal,))


def _on_cpu(config: RunConfig) -> bool:
    return config.cluster.device == "cpu"


def _engine_sequences(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    tokens = config.rollout.max_num_batched_tokens
    if tokens is None or tokens >= config.rollout.max_num_seqs:
        return
    # on cpu another rule asks for more where a sample does not fit
    off_cpu = leaf(config, "cluster.device") not in ("cpu", None)
    if off_cpu or tokens >= config.data.max_sample_length:
        why = "vLLM refuses to start: each sequence takes one token a step"
        yield Violation("rollout.max_num_seqs", f"must be at most max_num_batched_tokens = {tokens}", why, (tokens,))


def _lacks_tokens(config: RunConfig) -> bool:
    """Whether the longest sample exceeds the token limit of an engine step."""
    limit = config.rollout.max_num_batched_tokens
    return limit is not None and limit < config.data.max_sample_length


def filters(rollout: RolloutConfig) -> dict[str, float]:
    """Returns the settings that exclude words from sampling training responses, with their values."""
    return {name: leaf(rollout, name) for name, neutral in _UNFILTERED.items() if leaf(rollout, name) != neutral}


def _filters(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """Refuses filters where ratios are taken against the engine's log-probs. Both must have the same distribution."""
    loss_readers = log_prob_readers(config)[:-1]
    if not loss_readers:
        return
    for name in filters(config.rollout):
        rule = f"must be {_UNFILTERED[name]:g} with {' and '.join(loss_readers)}"
        yield Violation(f"rollout.{name}", rule, _RENORMALISED, (_UNFILTERED[name],))


def log_prob_readers(config: RunConfig) -> list[str]:
    """Returns what needs the engine's log-probs. The mismatch metrics, which nothing depends on, come last."""
    algorithm = config.algorithm
    corrected = algorithm.rollout_correction.level is not None
    anchored = algorithm.anchor == "rollout"
    readers = [
        ("algorithm.rollout_correction", corrected),
        ("algorithm.anchor: rollout", anchored),
        ("the mismatch metrics", True),
    ]
    return [name for name, needed in readers if needed]


# kinds of rope_type whose angles do not depend on the number of positions, in transformers and in vLLM
FREE_OF_LENGTH = ("default", "linear", "llama3")


def _positions(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    """Refuses another number of positions where it would change what the model computes."""
    key = "model.max_position_embeddings"
    positions = config.model.max_position_embeddings
    if positions is None:
        return
    if model.rotation.kind not in FREE_OF_LENGTH:
        rule = f"must be left out with rope_type {model.rotation.kind}"
        yield Violation(key, rule, "angles of its heads depend on the number, or a table in vLLM ends at its own")
    if model.is_wrapped:
        why = "engines would read it from the configuration inside that of the text model"
        yield Violation(key, "must be left out for the text model of one that also reads images", why)
    if config.rollout.drafts_with_model:
        why = "vLLM makes the predicting layer's table of angles by the checkpoint's own number"
        yield Violation(key, "must be left out with rollout.speculation.method mtp", why)
    if config.rollout.vllm_kwargs.get("hf_overrides"):
        yield Violation(f"{_VLLM}.hf_overrides", f"must be left out beside {key}", "mrl itself sets the number there")
    if not (Path(config.model.path) / "config.json").is_file():
        return
    stored = own_config(read_hf_config(config.model.path))
    window = stored.get("sliding_window") if stored.get("use_sliding_window", True) else None
    if not model.sliding_window and type(window) is int and stored["max_position_embeddings"] <= window < positions:
        rule = f"must be at most {window}, the sliding_window of config.json"
        yield Violation(key, rule, "its own positions never left that window; longer samples would", (window,))


def _legal_response_length(config: RunConfig, model: ModelSpec) -> tuple[int, ...]:
    left = model.longest_sample - config.data.max_prompt_length
    if left > 0:
        return (left,)
    return ()


def _cpu_kernels(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    if not _on_cpu(config):
        return
    for name, size in _cpu_sizes(config, model):
        if size % _CPU_MULTIPLE:
            rule = f"has {name} = {size} on one worker, which must be a multiple of {_CPU_MULTIPLE}"
            yield Violation("model.path", rule, "vLLM's CPU kernels compute in blocks of that size")


def _cpu_sizes(config: RunConfig, model: ModelSpec) -> Iterator[tuple[str, int]]:
    yield "hidden_size", model.hidden_size
    if model.is_moe:
        rollout = config.rollout
        yield (
            "moe_intermediate_size",
            model.moe_intermediate_size // max(1, rollout.workers_per_engine // rollout.expert_parallel_size),
        )


def _tools(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    turns = config.rollout.turns
    if turns is None or config.rollout.endpoint:
        return
    from mrl.acting.named import REPOSITORY, SHIPPED, SHIPPED_ENVIRONMENTS
    from mrl.acting.search_tool import SEARCH
    from mrl.acting.verl_tool_config import CONFIG_KEY, VERL_TOOLS

    if not turns.tools and not turns.environments and not turns.mcp_servers:
        rule = "must name a tool where there is no environment"
        yield Violation("rollout.turns.tools", rule, "there is nothing to call", SHIPPED)
    yield from _names("rollout.turns.tools", turns.tools, SHIPPED, turns.path, "function")
    if SEARCH in turns.tools and turns.index is None and turns.path is None:
        why = "search finds passages in a file; scripts/make_search_index.py writes one"
        yield Violation("rollout.turns.index", "must be given with the tool search", why, ())
    if VERL_TOOLS in turns.environments and turns.tool_config_path is None and turns.path is None:
        why = "verl_tools is made of verl's file of tools"
        yield Violation(CONFIG_KEY, "must be given with the environment verl_tools", why, ())
    if REPOSITORY in turns.environments and turns.sandbox is None and turns.path is None:
        why = "repository acts in sandboxes"
        yield Violation("rollout.turns.sandbox", "must be given with the environment repository", why, ({},))
    known = SHIPPED_ENVIRONMENTS
    yield from _names("rollout.turns.environments", turns.environments, known, turns.path, "class")


def _mcp_servers(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    """Checks what is said of MCP servers. Whether they answer is tried where their tools are loaded."""
    turns = config.rollout.turns
    if turns is None or not turns.mcp_servers:
        return
    from mrl.acting.mcp_tools import KEY, ServerSpec

    for name, given in turns.mcp_servers.items():
        try:
            server = ServerSpec.of(name, given)
        except ValueError as error:
            yield Violation(f"{KEY}.{name}", str(error), "an entry says how one server is reached")
            continue
        if server.url is not None and not turns.network:
            why = f"{KEY}.{name} is reached by a socket"
            yield Violation("rollout.turns.network", "must be true with a server that has a url", why, (True,))
        for variable in server.headers.values():
            if not given_environment({variable: ""}, turns.environment):
                why = f"{KEY}.{name}.headers takes a value from it, and processes of tools see few variables"
                yield Violation("rollout.turns.environment", f"must name {variable}", why, (variable,))


def _call_in_time(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    turns = config.rollout.turns
    if turns is not None and turns.timeout_s >= turns.max_seconds:
        why = "a response would end before a call that hangs is answered by an error"
        rule = f"must be less than max_seconds = {turns.max_seconds:g}"
        yield Violation("rollout.turns.timeout_s", rule, why, (turns.max_seconds / 2,))


def _program_in_time(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    turns = config.rollout.turns
    if turns is None or not turns.runs_programs:
        return
    if turns.python.max_seconds >= turns.timeout_s:
        why = "a program that hangs would only be killed together with the process that calls tools"
        rule = f"must be less than timeout_s = {turns.timeout_s:g}"
        yield Violation("rollout.turns.python.max_seconds", rule, why, (turns.timeout_s / 2,))


def _sandbox_in_time(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    turns = config.rollout.turns
    if turns is None or turns.sandbox is None or config.rollout.endpoint:
        return
    if turns.sandbox.max_command_seconds >= turns.timeout_s:
        why = "a command that hangs would only be ended together with the process of its environment"
        rule = f"must be less than timeout_s = {turns.timeout_s:g}"
        yield Violation("rollout.turns.sandbox.max_command_seconds", rule, why, (turns.timeout_s / 2,))


def _rewards_environment(config: RunConfig) -> bool:
    return config.reward.custom_reward_function is None and config.reward.function == ENVIRONMENT


def _parts(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    """Checks the reward parts that shipped environments declare. Parts of other environments are not known here."""
    turns = config.rollout.turns
    if not (_rewards_environment(config) and turns and turns.environments) or turns.path is not None:
        return
    from mrl.acting.builtin import BUILTIN_ENVIRONMENTS

    declared = [set(BUILTIN_ENVIRONMENTS[name].parts) for name in turns.environments if name in BUILTIN_ENVIRONMENTS]
    bonus = config.reward.bonus_rules
    of_all = set.intersection(*declared) if declared else set()
    known = ("score", "reward", ACC, *sorted(of_all), *bonus, *(("main",) if bonus else ()))
    for field, names in _read_parts(config.algorithm):
        unknown = [name for name in names if name not in known]
        if unknown:
            why = "the parts are those that every environment of rollout.turns.environments declares"
            yield Violation(field, f"names {unknown[0]}, which is no part of the reward", why, known)


def _read_parts(algorithm: AlgorithmConfig) -> Iterator[tuple[str, Sequence[str]]]:
    filtering = algorithm.filter_groups
    yield "algorithm.filter_groups.metric", (filtering.metric,) if filtering.enable else ()
    yield "algorithm.gdpo_reward_keys", algorithm.gdpo_reward_keys


def _names(
    field: str, names: Sequence[str], known: tuple[str, ...], path: str | None, kind: str
) -> Iterator[Violation]:
    """Checks the names of tools or of environments."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        yield Violation(field, f"names {twice[0]} twice", "it is not clear which one is meant", ())
    unknown = [name for name in names if name not in known]
    if unknown and path is None:
        why = f"{unknown[0]} is not shipped; a {kind} of your own goes under rollout.turns.path"
        yield Violation(field, "must name shipped ones where there is no path", why, known)


ROLLOUT_RULES = (
    _layout,
    _dense_layers,
    RuleRow(
        _EP,
        lambda c, m: not m.is_moe and c.rollout.expert_parallel_size != 1,
        "must be 1 for a dense model",
        "there are no experts to spread",
        (1,),
    ),
    RuleRow(
        _DP,
        lambda c, m: not m.is_moe and c.rollout.data_parallel_size != 1,
        "must be 1 for a dense model",
        "data-parallel ranks share experts, and vLLM starts none for a model without; copies of a dense model are "
        "rollout.num_engines",
        (1,),
    ),
    _experts,
    _tuned_experts,
    _cluster,
    _placement,
    RuleRow(
        _TP,
        lambda c, m: (
            c.cluster.placement == "colocated" and c.cluster.n_gpus_per_node % c.rollout.tensor_model_parallel_size != 0
        ),
        "must divide cluster.n_gpus_per_node = {c.cluster.n_gpus_per_node} with cluster.placement colocated",
        "every device of a rank has a worker, and an engine's tensor workers share a node",
        lambda c, m: _nearest_degrees(c, lambda tp: c.cluster.n_gpus_per_node % tp == 0),
    ),
    RuleRow(
        _TP,
        lambda c, m: (
            c.cluster.placement == "separate"
            and c.cluster.device != "cpu"
            and c.rollout.tensor_model_parallel_size > c.cluster.n_gpus_per_node
        ),
        "must be at most cluster.n_gpus_per_node = {c.cluster.n_gpus_per_node}",
        "an engine's tensor workers share a node: vLLM's executors over several hang (vllm-project/vllm#50835)",
        lambda c, m: _nearest_degrees(c, lambda tp: tp <= c.cluster.n_gpus_per_node),
    ),
    _log_probs,
    _filters,
    _positions,
    RuleRow(
        "rollout.min_engines",
        lambda c, m: c.rollout.min_engines > c.rollout.num_engines,
        "must be at most rollout.num_engines = {c.rollout.num_engines}",
        "the run would end with its first step, though no engine is lost",
        lambda c, m: (c.rollout.num_engines,),
    ),
    RuleRow(
        f"{_VLLM}.quantization",
        lambda c, m: c.rollout.vllm_kwargs.get("quantization") is not None,
        "must be null",
        "the weight sync quantises the weights, as rollout.quantization says",
        (None,),
    ),
    RuleRow(
        f"{_VLLM}.pipeline_parallel_size",
        lambda c, m: c.rollout.vllm_kwargs.get("pipeline_parallel_size", 1) != 1,
        "must be 1",
        "the weight sync knows engines cut by tensor, data and expert parallelism",
        (1,),
    ),
    _fixed_experts,
    _engine_sequences,
    RuleRow(
        "rollout.max_num_batched_tokens",
        lambda c, m: not _on_cpu(c) and c.rollout.enable_chunked_prefill is False and _lacks_tokens(c),
        "must be at least max_prompt_length + max_response_length = {c.data.max_sample_length} with "
        "enable_chunked_prefill: false",
        "vLLM refuses to start: a prompt may then not come in parts",
        lambda c, m: (c.data.max_sample_length,),
    ),
    RuleRow(
        "data.max_response_length",
        lambda c, m: c.data.max_sample_length > m.max_position_embeddings,
        "plus max_prompt_length = {c.data.max_prompt_length} must be at most max_position_embeddings = "
        "{m.max_position_embeddings}",
        "the model knows no positions beyond",
        _legal_response_length,
    ),
    RuleRow(
        "data.max_response_length",
        lambda c, m: m.longest_sample < c.data.max_sample_length <= m.max_position_embeddings,
        "plus max_prompt_length = {c.data.max_prompt_length} must be at most {m.longest_sample} with rope_type "
        "{m.rotation.kind}",
        "trainer and engines rotate alike only up to there: longrope's original positions, or yarn's factor times them",
        _legal_response_length,
    ),
    RuleRow(
        _TP,
        lambda c, m: _on_cpu(c) and c.rollout.tensor_model_parallel_size not in _CPU_TENSOR,
        "must be 1 or 2 on cpu",
        "vLLM's CPU build was never tried with more",
        _CPU_TENSOR,
    ),
    RuleRow(
        "rollout.enforce_eager",
        lambda c, m: _on_cpu(c) and c.rollout.enforce_eager is False,
        "must be true or null on cpu",
        "vLLM's CPU build has no graphs to capture",
        (True, None),
    ),
    on_only_where(
        "rollout.enable_chunked_prefill",
        lambda c, m: not _on_cpu(c),
        "must be false or null on cpu",
        "a prompt computed in parts kills requests with a seed, and its log-probs depend on the rest of the batch",
        (False, None),
    ),
    _cpu_kernels,
    RuleRow(
        "rollout.max_num_batched_tokens",
        lambda c, m: _on_cpu(c) and _lacks_tokens(c),
        "must be at least max_prompt_length + max_response_length = {c.data.max_sample_length}",
        "on cpu a prompt is never computed in parts, because per-request seeds and repeatable bits need it whole",
        lambda c, m: (c.data.max_sample_length,),
    ),
    _tools,
    _mcp_servers,
    _call_in_time,
    _program_in_time,
    _sandbox_in_time,
    _parts,
    RuleRow(
        "reward.function",
        lambda c, m: (
            _rewards_environment(c)
            and not c.rollout.endpoint
            and not (c.rollout.turns and c.rollout.turns.environments)
        ),
        "must be another one without rollout.turns.environments",
        "it uses the reward of the response's environment",
    ),
    RuleRow(
        "reshard.transport",
        lambda c, m: c.reshard.transport == "shm" and c.cluster.nnodes > 1,
        "must be auto, p2p or ipc on more than one node",
        "shm connects processes of one host",
        ("auto", "p2p", "ipc"),
    ),
)
