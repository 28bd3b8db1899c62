"""Rollout engines: their layout against the model and the cluster, sampling that training can use, and what vLLM's CPU build can do."""

from collections.abc import Iterator

from mrl.config.batch_rules import nearest
from mrl.config.schema import RunConfig
from mrl.config.violation import Broken
from mrl.errors import ConfigError
from mrl.model import ModelSpec
from mrl.model.device_grid import ClusterShape, engine_places
from mrl.model.layout import RolloutLayout

_TP, _EP = "rollout.tensor_model_parallel_size", "rollout.expert_parallel_size"
_CPU_MULTIPLE = 32  # of vLLM's CPU kernels
_CPU_TENSOR = (1, 2)


def rollout_rules(config: RunConfig, model: ModelSpec) -> Iterator[Broken]:
    yield from _layout(config, model)
    yield from _cluster(config)
    yield from _placement(config)
    yield from _sampling(config)
    yield from _engine(config)
    yield from _lengths(config, model)
    if config.cluster.device == "cpu":
        yield from _cpu(config, model)


def rollout_notes(config: RunConfig, model: ModelSpec) -> Iterator[str]:
    """Number formats that differ between generation and training, and devices that are left idle."""
    dtype, trained = config.rollout_dtype, config.model.dtype
    if dtype != trained:
        yield f"rollout.dtype {dtype} differs from model.dtype {trained}: generation and training compute other probabilities"
    if trained != model.dtype:
        yield f"model.dtype {trained} differs from the checkpoint's {model.dtype}: weights are converted when they are loaded"
    if config.rollout.data_parallel_size > 1 and config.rollout.expert_parallel_size == 1 and model.is_moe:
        yield "rollout.data_parallel_size above 1 without expert parallelism was seen to hang (verl-project/verl #5607)"
    idle = cluster_devices(config) - needed_devices(config)
    if idle > 0:
        yield f"{idle} of {cluster_devices(config)} devices are used by neither the actor nor an engine"


def workers_per_engine(config: RunConfig) -> int:
    return config.rollout.tensor_model_parallel_size * config.rollout.data_parallel_size


def cluster_devices(config: RunConfig) -> int:
    return config.cluster.nnodes * config.cluster.n_gpus_per_node


def needed_devices(config: RunConfig) -> int:
    """Devices of actor and engines: beside each other, or on the same ones."""
    actor, engines = config.actor.layout.world_size, config.rollout.num_engines * workers_per_engine(config)
    return actor + engines if config.cluster.placement == "separate" else max(actor, engines)


def _layout(config: RunConfig, model: ModelSpec) -> Iterator[Broken]:
    tp, ep, workers = config.rollout.tensor_model_parallel_size, config.rollout.expert_parallel_size, workers_per_engine(config)
    heads, kv = model.num_attention_heads, model.num_key_value_heads
    if heads % tp or (kv % tp and tp % kv):
        rule = f"must divide num_attention_heads = {heads}, and divide num_key_value_heads = {kv} or be a multiple of it"
        legal = nearest(tp, heads, lambda v: heads % v == 0 and (kv % v == 0 or v % kv == 0))
        yield Broken(_TP, rule, "each worker computes whole heads", legal)
    size = model.intermediate_size if len(model.moe_layers) < model.num_layers else 0
    if size % tp:
        legal = nearest(tp, heads, lambda v: size % v == 0)
        yield Broken(_TP, f"must divide intermediate_size = {size}", "projections are cut into equal slices", legal)
    yield from _experts(config, model, ep, workers)


def _experts(config: RunConfig, model: ModelSpec, ep: int, workers: int) -> Iterator[Broken]:
    if not model.is_moe and ep != 1:
        yield Broken(_EP, "must be 1 for a dense model", "there are no experts to spread", (1,))
    elif ep not in (1, workers):
        why = f"vLLM spreads experts over all workers of an engine (tensor x data = {workers}) or over none"
        allowed = tuple(sorted({1, workers}))
        yield Broken(_EP, f"must be {' or '.join(map(str, allowed))}", why, allowed)
    elif model.is_moe and model.moe_intermediate_size % (workers // ep):
        size, data = model.moe_intermediate_size, config.rollout.data_parallel_size
        rule = f"times data_parallel_size = {data} must divide moe_intermediate_size = {size}"
        legal = nearest(config.rollout.tensor_model_parallel_size, size, lambda v: size % (v * data) == 0)
        yield Broken(_TP, rule, "without expert parallelism every expert is cut over all workers of an engine", legal)


def _cluster(config: RunConfig) -> Iterator[Broken]:
    have, need, rollout = cluster_devices(config), needed_devices(config), config.rollout
    if need <= have:
        return
    actor, engines = config.actor.layout.world_size, f"{rollout.num_engines} x {workers_per_engine(config)}"
    how = (
        f"actor {actor} + engines {engines}"
        if config.cluster.placement == "separate"
        else f"the larger of actor {actor} and engines {engines}"
    )
    why = f"{how} = {need} devices, and {config.cluster.nnodes} x {config.cluster.n_gpus_per_node} = {have} are there"
    per_node = -(-need // config.cluster.nnodes)
    yield Broken("cluster.n_gpus_per_node", f"times nnodes must be at least {need}", why, (per_node,))


def _placement(config: RunConfig) -> Iterator[Broken]:
    """Engines stand on whole nodes or inside one; spoken only where there are devices enough."""
    rollout, cluster = config.rollout, ClusterShape(config.cluster.nnodes, config.cluster.n_gpus_per_node)
    if config.cluster.device == "cpu" or needed_devices(config) > cluster.devices:
        return
    first = config.actor.layout.world_size if config.cluster.placement == "separate" else 0
    tp, dp = rollout.tensor_model_parallel_size, rollout.data_parallel_size

    def fault(engines: int) -> str:
        try:
            engine_places(RolloutLayout(engines, tp, dp), cluster, first)
        except ConfigError as error:
            return str(error)
        return ""

    if why := fault(rollout.num_engines):
        allowed = nearest(rollout.num_engines, rollout.num_engines, lambda n: not fault(n))
        yield Broken("rollout.num_engines", "cannot be placed on the nodes", why, allowed)


def _engine(config: RunConfig) -> Iterator[Broken]:
    rollout = config.rollout
    if not rollout.calculate_log_probs:
        readers = log_prob_readers(config)
        why = f"read by {', '.join(readers)}; the engine computes them anyway"
        yield Broken("rollout.calculate_log_probs", "must be true", why, (True,))
    if (given := rollout.engine_kwargs.get("vllm", {})).get("quantization") is not None:
        why = "weights arrive after every update as they are trained, and no sync of ours quantises them on the way"
        yield Broken("rollout.engine_kwargs.vllm.quantization", "must be null", why, (None,))
    if given.get("pipeline_parallel_size", 1) != 1:
        why = "the weight sync knows engines cut by tensor, data and expert parallelism"
        yield Broken("rollout.engine_kwargs.vllm.pipeline_parallel_size", "must be 1", why, (1,))
    length, tokens = config.data.max_prompt_length + config.data.max_response_length, rollout.max_num_batched_tokens
    on_cpu = config.cluster.device == "cpu"
    if tokens is not None and tokens < rollout.max_num_seqs and (not on_cpu or tokens >= length):
        why = "vLLM refuses to start: each sequence takes one token a step"
        yield Broken("rollout.max_num_seqs", f"must be at most max_num_batched_tokens = {tokens}", why, (tokens,))
    if not on_cpu and rollout.enable_chunked_prefill is False and (tokens or length) < length:
        rule = f"must be at least max_prompt_length + max_response_length = {length} with enable_chunked_prefill: false"
        yield Broken("rollout.max_num_batched_tokens", rule, "vLLM refuses to start: a prompt may then not come in parts", (length,))


def log_prob_readers(config: RunConfig) -> list[str]:
    """What needs the engine's log-probs."""
    algorithm = config.algorithm
    corrected = algorithm.rollout_correction.level is not None
    anchored = algorithm.anchor == "rollout"
    readers = [("algorithm.rollout_correction", corrected), ("algorithm.anchor: rollout", anchored), ("the mismatch metrics", True)]
    return [name for name, needed in readers if needed]


def _sampling(config: RunConfig) -> Iterator[Broken]:
    why = (
        "a filter leaves words out and scales the rest up: the engine's log-probs would be renormalised on the filtered set, "
        "training's would not; filters are for rollout.val_kwargs"
    )
    if config.rollout.top_p != 1.0:
        yield Broken("rollout.top_p", "must be 1.0 for training responses", why, (1.0,))
    if config.rollout.top_k != -1:
        yield Broken("rollout.top_k", "must be -1 (no filter) for training responses", why, (-1,))


def _lengths(config: RunConfig, model: ModelSpec) -> Iterator[Broken]:
    prompt, response, limit = config.data.max_prompt_length, config.data.max_response_length, model.max_position_embeddings
    if prompt + response > limit:
        allowed = (limit - prompt,) if prompt < limit else ()
        rule = f"plus max_prompt_length = {prompt} must be at most max_position_embeddings = {limit}"
        yield Broken("data.max_response_length", rule, "the model knows no positions beyond", allowed)


def _cpu(config: RunConfig, model: ModelSpec) -> Iterator[Broken]:
    rollout = config.rollout
    if rollout.tensor_model_parallel_size not in _CPU_TENSOR:
        yield Broken(_TP, "must be 1 or 2 on cpu", "vLLM's CPU build was seen to work with no more", _CPU_TENSOR)
    if rollout.expert_parallel_size != 1:
        yield Broken(_EP, "must be 1 on cpu", "vLLM's CPU kernel for spread experts crashes while it generates", (1,))
    if rollout.enforce_eager is False:
        yield Broken("rollout.enforce_eager", "must be true or null on cpu", "vLLM's CPU build has no graphs to capture", (True, None))
    if rollout.enable_chunked_prefill:
        why = "a prompt computed in parts kills requests with a seed, and its log-probs depend on the rest of the batch"
        yield Broken("rollout.enable_chunked_prefill", "must be false or null on cpu", why, (False, None))
    for name, size in _cpu_sizes(config, model):
        if size % _CPU_MULTIPLE:
            rule = f"has {name} = {size} on one worker, which must be a multiple of {_CPU_MULTIPLE}"
            yield Broken("model.path", rule, "vLLM's CPU kernels compute in blocks of that size")
    length = config.data.max_prompt_length + config.data.max_response_length
    if rollout.max_num_batched_tokens is not None and rollout.max_num_batched_tokens < length:
        why = "on cpu a prompt is never computed in parts, because per-request seeds and repeatable bits need it whole"
        yield Broken(
            "rollout.max_num_batched_tokens", f"must be at least max_prompt_length + max_response_length = {length}", why, (length,)
        )


def _cpu_sizes(config: RunConfig, model: ModelSpec) -> list[tuple[str, int]]:
    sizes = [("hidden_size", model.hidden_size)]
    if model.is_moe:
        sizes.append(("moe_intermediate_size", model.moe_intermediate_size // workers_per_engine(config)))
    return sizes
