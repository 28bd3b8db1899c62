"""Rollout engines: their layout against the model and the cluster, what vLLM's CPU build can do,
and how weights reach them.
"""

from collections.abc import Iterator

from mrl.config.schema import RunConfig, leaf
from mrl.errors import ConfigError, Violation, nearest
from mrl.model import ModelSpec
from mrl.model.device_grid import ClusterShape, engine_places
from mrl.model.layout import RolloutLayout
from mrl.platforms.hosting import get_hosting

_TP, _DP, _EP = "rollout.tensor_model_parallel_size", "rollout.data_parallel_size", "rollout.expert_parallel_size"
_CPU_MULTIPLE = 32  # of vLLM's CPU kernels
_CPU_TENSOR = (1, 2)
_UNFILTERED = {"top_p": 1.0, "top_k": -1}
_RENORMALISED = (
    "a filter leaves words out and scales the rest up: the engine's log-probs are renormalised on the "
    "filtered set, training's are not"
)
# vLLM's argument: legal
_FIXED_EXPERTS = {"enable_eplb": False, "enable_elastic_ep": False, "expert_placement_strategy": "linear"}


def rollout_notes(config: RunConfig, model: ModelSpec) -> Iterator[str]:
    """Number formats that differ between generation and training, and devices that are left idle."""
    dtype, trained = config.rollout_dtype, config.model.dtype
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
    if model.left_out_layers:
        yield (
            f"model.path: {model.left_out_layers} multi-token prediction layers are neither trained, "
            "exported nor used by engines"
        )
    for name, value in filters(config).items():
        yield (
            f"rollout.{name} {value:g}: {_RENORMALISED}. The loss reads only those of training (anchor: recompute), as "
            "verl's does; the mismatch metrics have the difference in them"
        )
    idle = cluster_devices(config) - needed_devices(config)
    if idle > 0:
        yield f"{idle} of {cluster_devices(config)} devices are used by neither the actor nor an engine"


def reshard_notes(config: RunConfig) -> Iterator[str]:
    """A transport that the device does not have."""
    reach = get_hosting(config.cluster.device).memory_reach
    if config.reshard.transport == "ipc" and reach != "node":
        between = "no" if reach == "process" else "no other"
        yield (
            f"reshard.transport ipc: a process of {config.cluster.device} can open {between} device's memory; weights "
            "go through shared memory of the host there"
        )


def cluster_devices(config: RunConfig) -> int:
    """Devices of all nodes."""
    return config.cluster.nnodes * config.cluster.n_gpus_per_node


def needed_devices(config: RunConfig) -> int:
    """Devices of actor and engines: beside each other, or on the same ones."""
    actor, engines = config.actor.layout.world_size, config.rollout.num_engines * config.rollout.workers_per_engine
    return actor + engines if config.cluster.placement == "separate" else max(actor, engines)


def engine_splits_heads(tensor: int, model: ModelSpec) -> bool:
    """Whether each of `tensor` workers of an engine computes whole heads;
    more workers than key/value heads share one.
    """
    heads, kv = model.num_attention_heads, model.num_key_value_heads
    return heads % tensor == 0 and (kv % tensor == 0 or tensor % kv == 0)


def _layout(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    tp, heads, kv = config.rollout.tensor_model_parallel_size, model.num_attention_heads, model.num_key_value_heads
    if not engine_splits_heads(tp, model):
        rule = (
            f"must divide num_attention_heads = {heads}, and divide num_key_value_heads = {kv} or be a multiple of it"
        )
        legal = nearest(tp, heads, lambda v: engine_splits_heads(v, model))
        yield Violation(_TP, rule, "each worker computes whole heads", legal)


def _dense_layers(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    tp, heads = config.rollout.tensor_model_parallel_size, model.num_attention_heads
    size = model.intermediate_size if len(model.moe_layers) < model.num_layers else 0
    if size % tp:
        legal = nearest(tp, heads, lambda v: size % v == 0)
        yield Violation(_TP, f"must divide intermediate_size = {size}", "projections are cut into equal slices", legal)


def _no_experts(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    if not model.is_moe and config.rollout.expert_parallel_size != 1:
        yield Violation(_EP, "must be 1 for a dense model", "there are no experts to spread", (1,))


def _dense_ranks(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    if not model.is_moe and config.rollout.data_parallel_size != 1:
        why = (
            "data-parallel ranks share experts, and vLLM starts none without; copies of a dense "
            "model are rollout.num_engines"
        )
        yield Violation(_DP, "must be 1 for a dense model", why, (1,))


def _experts(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    if not model.is_moe:
        return
    ep, workers = config.rollout.expert_parallel_size, config.rollout.workers_per_engine
    if ep not in (1, workers):
        why = f"vLLM spreads experts over all workers of an engine (tensor x data = {workers}) or over none"
        allowed = tuple(sorted({1, workers}))
        yield Violation(_EP, f"must be {' or '.join(map(str, allowed))}", why, allowed)
    elif model.moe_intermediate_size % (workers // ep):
        size, data = model.moe_intermediate_size, config.rollout.data_parallel_size
        rule = f"times data_parallel_size = {data} must divide moe_intermediate_size = {size}"
        legal = nearest(config.rollout.tensor_model_parallel_size, size, lambda v: size % (v * data) == 0)
        yield Violation(
            _TP, rule, "without expert parallelism every expert is cut over all workers of an engine", legal
        )


def _cluster(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    have, need, rollout = cluster_devices(config), needed_devices(config), config.rollout
    if need <= have:
        return
    actor, engines = config.actor.layout.world_size, f"{rollout.num_engines} x {config.rollout.workers_per_engine}"
    how = (
        f"actor {actor} + engines {engines}"
        if config.cluster.placement == "separate"
        else f"the larger of actor {actor} and engines {engines}"
    )
    why = f"{how} = {need} devices, and {config.cluster.nnodes} x {config.cluster.n_gpus_per_node} = {have} are there"
    per_node = -(-need // config.cluster.nnodes)
    yield Violation("cluster.n_gpus_per_node", f"times nnodes must be at least {need}", why, (per_node,))


def _placement(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """An engine stands on one node, or each of its data-parallel ranks does;
    spoken only where there are devices enough.
    """
    rollout, cluster = config.rollout, ClusterShape(config.cluster.nnodes, config.cluster.n_gpus_per_node)
    tp, dp = rollout.tensor_model_parallel_size, rollout.data_parallel_size
    if config.cluster.device == "cpu" or needed_devices(config) > cluster.devices or tp > cluster.devices_per_node:
        return
    first = config.actor.layout.world_size if config.cluster.placement == "separate" else 0

    def fault(engines: int) -> str:
        try:
            engine_places(RolloutLayout(engines, tp, dp), cluster, first)
        except ConfigError as error:
            return str(error)
        return ""

    if why := fault(rollout.num_engines):
        allowed = nearest(rollout.num_engines, rollout.num_engines, lambda n: not fault(n))
        yield Violation("rollout.num_engines", "cannot be placed on the nodes", why, allowed)


def _shared_devices(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    tp, per_node = config.rollout.tensor_model_parallel_size, config.cluster.n_gpus_per_node
    if config.cluster.placement == "colocated" and per_node % tp:
        allowed = nearest(tp, per_node, lambda v: per_node % v == 0)
        why = "every device of a rank has a worker, and an engine's tensor workers share a node"
        yield Violation(
            _TP, f"must divide cluster.n_gpus_per_node = {per_node} with cluster.placement colocated", why, allowed
        )


def _own_devices(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    tp, per_node = config.rollout.tensor_model_parallel_size, config.cluster.n_gpus_per_node
    if config.cluster.placement == "separate" and config.cluster.device != "cpu" and tp > per_node:
        why = "an engine's tensor workers share a node: vLLM's executors over several hang (vllm-project/vllm#50835)"
        yield Violation(
            _TP,
            f"must be at most cluster.n_gpus_per_node = {per_node}",
            why,
            nearest(tp, per_node, lambda v: v <= per_node),
        )


def _log_probs(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    if not config.rollout.calculate_log_probs:
        why = f"read by {', '.join(log_prob_readers(config))}; the engine computes them anyway"
        yield Violation("rollout.calculate_log_probs", "must be true", why, (True,))


def _vllm_arguments(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    given = config.rollout.vllm_kwargs
    if given.get("quantization") is not None:
        why = "weights arrive after every update as they are trained, and no sync of ours quantises them on the way"
        yield Violation("rollout.engine_kwargs.vllm.quantization", "must be null", why, (None,))
    if given.get("pipeline_parallel_size", 1) != 1:
        why = "the weight sync knows engines cut by tensor, data and expert parallelism"
        yield Violation("rollout.engine_kwargs.vllm.pipeline_parallel_size", "must be 1", why, (1,))


def _fixed_experts(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    given = config.rollout.vllm_kwargs
    for name, legal in _FIXED_EXPERTS.items():
        if given.get(name, legal) != legal:
            why = (
                "experts would move between workers, or stand where the plan of the weight sync does not look for them"
            )
            yield Violation(f"rollout.engine_kwargs.vllm.{name}", f"must be {str(legal).lower()}", why, (legal,))


def _longest(config: RunConfig) -> int:
    """Tokens of the longest prompt and response."""
    return config.data.max_prompt_length + config.data.max_response_length


def _on_cpu(config: RunConfig) -> bool:
    return config.cluster.device == "cpu"


def _engine_sequences(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    tokens = config.rollout.max_num_batched_tokens
    # on cpu _cpu_tokens asks for more where a sample does not fit
    off_cpu = leaf(config, "cluster.device") not in ("cpu", None)
    if tokens is not None and tokens < config.rollout.max_num_seqs and (off_cpu or tokens >= _longest(config)):
        why = "vLLM refuses to start: each sequence takes one token a step"
        yield Violation("rollout.max_num_seqs", f"must be at most max_num_batched_tokens = {tokens}", why, (tokens,))


def _engine_tokens(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    rollout = config.rollout
    if not _on_cpu(config) and rollout.enable_chunked_prefill is False and rollout.max_num_batched_tokens:
        length = _longest(config)
        if rollout.max_num_batched_tokens < length:
            rule = (
                f"must be at least max_prompt_length + max_response_length = {length} with "
                "enable_chunked_prefill: false"
            )
            yield Violation(
                "rollout.max_num_batched_tokens",
                rule,
                "vLLM refuses to start: a prompt may then not come in parts",
                (length,),
            )


def filters(config: RunConfig) -> dict[str, float]:
    """Settings by which words are left out of training responses, with their values."""
    return {
        name: leaf(config.rollout, name)
        for name, neutral in _UNFILTERED.items()
        if leaf(config.rollout, name) != neutral
    }


def _filters(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """Ratios against the engine's log-probs need the distribution that training computes."""
    loss_readers = log_prob_readers(config)[:-1]
    for name in filters(config) if loss_readers else ():
        rule = f"must be {_UNFILTERED[name]:g} with {' and '.join(loss_readers)}"
        yield Violation(f"rollout.{name}", rule, _RENORMALISED, (_UNFILTERED[name],))


def log_prob_readers(config: RunConfig) -> list[str]:
    """What needs the engine's log-probs; the mismatch metrics, which nothing depends on, come last."""
    algorithm = config.algorithm
    corrected = algorithm.rollout_correction.level is not None
    anchored = algorithm.anchor == "rollout"
    readers = [
        ("algorithm.rollout_correction", corrected),
        ("algorithm.anchor: rollout", anchored),
        ("the mismatch metrics", True),
    ]
    return [name for name, needed in readers if needed]


def _lengths(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    prompt, response, limit = (
        config.data.max_prompt_length,
        config.data.max_response_length,
        model.max_position_embeddings,
    )
    if prompt + response > limit:
        allowed = (limit - prompt,) if prompt < limit else ()
        rule = f"plus max_prompt_length = {prompt} must be at most max_position_embeddings = {limit}"
        yield Violation("data.max_response_length", rule, "the model knows no positions beyond", allowed)


def _cpu_workers(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    if _on_cpu(config) and config.rollout.tensor_model_parallel_size not in _CPU_TENSOR:
        yield Violation(_TP, "must be 1 or 2 on cpu", "vLLM's CPU build was seen to work with no more", _CPU_TENSOR)


def _cpu_eager(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    if _on_cpu(config) and config.rollout.enforce_eager is False:
        yield Violation(
            "rollout.enforce_eager",
            "must be true or null on cpu",
            "vLLM's CPU build has no graphs to capture",
            (True, None),
        )


def _cpu_prefill(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    if _on_cpu(config) and config.rollout.enable_chunked_prefill:
        why = "a prompt computed in parts kills requests with a seed, and its log-probs depend on the rest of the batch"
        yield Violation("rollout.enable_chunked_prefill", "must be false or null on cpu", why, (False, None))


def _cpu_kernels(config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
    for name, size in _cpu_sizes(config, model) if config.cluster.device == "cpu" else ():
        if size % _CPU_MULTIPLE:
            rule = f"has {name} = {size} on one worker, which must be a multiple of {_CPU_MULTIPLE}"
            yield Violation("model.path", rule, "vLLM's CPU kernels compute in blocks of that size")


def _cpu_tokens(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    rollout = config.rollout
    if config.cluster.device != "cpu":
        return
    length = config.data.max_prompt_length + config.data.max_response_length
    if rollout.max_num_batched_tokens is not None and rollout.max_num_batched_tokens < length:
        why = "on cpu a prompt is never computed in parts, because per-request seeds and repeatable bits need it whole"
        yield Violation(
            "rollout.max_num_batched_tokens",
            f"must be at least max_prompt_length + max_response_length = {length}",
            why,
            (length,),
        )


def _cpu_sizes(config: RunConfig, model: ModelSpec) -> Iterator[tuple[str, int]]:
    yield "hidden_size", model.hidden_size
    if model.is_moe:
        rollout = config.rollout
        yield (
            "moe_intermediate_size",
            model.moe_intermediate_size // max(1, rollout.workers_per_engine // rollout.expert_parallel_size),
        )


def _transport(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    kind, nodes = config.reshard.transport, config.cluster.nnodes
    if kind == "shm" and nodes > 1:
        why = f"{kind} connects processes of one host, and cluster.nnodes is {nodes}"
        yield Violation(
            "reshard.transport", "must be auto, p2p or ipc on more than one node", why, ("auto", "p2p", "ipc")
        )


ROLLOUT_RULES = (
    _layout,
    _dense_layers,
    _no_experts,
    _dense_ranks,
    _experts,
    _cluster,
    _placement,
    _shared_devices,
    _own_devices,
    _log_probs,
    _filters,
    _vllm_arguments,
    _fixed_experts,
    _engine_sequences,
    _engine_tokens,
    _lengths,
    _cpu_workers,
    _cpu_eager,
    _cpu_prefill,
    _cpu_kernels,
    _cpu_tokens,
    _transport,
)
