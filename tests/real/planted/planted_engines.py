"""Faults of engines. Each is given the module that it changes, the first step that has it, and a step's responses."""

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace


def _is_first_to_ask(name):
    """Tells whether this process is the first of the run to ask, so that one engine of several has a fault."""
    path = Path(os.environ["MRL_MARKS"]) / name
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _of_requests(module, first, responses, change):
    """Calls `change(parameters, sampling, step)` for the sampling parameters of each request."""
    made = module.sampling_parameters
    count = {"asked": 0}

    def changed(request, sampling):
        parameters = made(request, sampling)
        step = 1 + count["asked"] // responses
        count["asked"] += 1
        if step >= first:
            change(parameters, sampling, step)
        return parameters

    module.sampling_parameters = changed


def temperature(module, first, responses):
    """Engines sample at another temperature than the ranks compute with."""

    def colder(parameters, sampling, _):
        parameters.temperature = 0.6 * sampling.temperature

    _of_requests(module, first, responses, colder)


def _weights(model, layer):
    """The experts' two weights of a layer."""
    named = dict(model.model.layers[layer].mlp.named_parameters())
    return [next(value for name, value in named.items() if name.endswith(end)) for end in ("w13_weight", "w2_weight")]


def _of_steps(module, change):
    """Calls `change(model, step)` before each forward. A step begins when the experts' weights are others."""
    kind = module.Qwen3MoeForCausalLM
    forward = kind.forward

    def forwarded(self, *arguments, **named):
        state = self.__dict__.setdefault("_planted", {"step": 0, "sum": None})
        if float(_weights(self, 0)[0].sum()) != state["sum"]:
            state["step"] += 1
        change(self, state["step"])
        state["sum"] = float(_weights(self, 0)[0].sum())
        return forward(self, *arguments, **named)

    kind.forward = forwarded


def yarn(module, first, _):
    """Positions are stretched as by YaRN, of which the trainer knows nothing."""

    def change(model, step):
        if step != first:
            return
        from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding as Yarn
        from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import yarn_get_mscale

        for layer in model.model.layers:
            own = layer.self_attn.rotary_emb
            # vLLM's own functions; its class is made only where an engine starts
            made = SimpleNamespace(
                rotary_dim=own.rotary_dim, base=own.base, max_position_embeddings=own.max_position_embeddings // 4,
                scaling_factor=4.0, beta_fast=32, beta_slow=1, truncate=True, mscale=yarn_get_mscale(4.0),
            )  # fmt: skip
            made._compute_inv_freq = partial(Yarn._compute_inv_freq, made)
            stretched = Yarn._compute_cos_sin_cache(made)[: len(own.cos_sin_cache)]

            # the cache is put back each time: a sync ends a run whose constants are not those of the start
            def turned(*arguments, cache=own.cos_sin_cache, stretched=stretched, forward=own.forward):
                usual = cache.clone()
                cache.copy_(stretched)
                try:
                    return forward(*arguments)
                finally:
                    cache.copy_(usual)

            own.forward = turned

    _of_steps(module, change)


def router(module, first, _):
    """The router computes in bfloat16."""

    def change(model, step):
        if step != first:
            return
        import torch

        for layer in model.model.layers:
            gate = layer.mlp.gate

            def rounded(values, own=gate.forward):
                logits = own(values.to(torch.bfloat16).to(values.dtype))
                if isinstance(logits, tuple):
                    return logits[0].to(torch.bfloat16).to(values.dtype), *logits[1:]
                return logits.to(torch.bfloat16).to(values.dtype)

            gate.forward = rounded

    _of_steps(module, change)


def stale_expert(module, first, _):
    """One expert of one engine keeps the weights of the step before."""

    def change(model, step):
        weights = _weights(model, 1)
        own = model.__dict__.setdefault("_expert", {})
        if step < first:
            own["kept"] = [each.data[2].clone() for each in weights]
            return
        if "planted" not in own:
            own["planted"] = _is_first_to_ask("stale_expert")
        if own["planted"]:
            for each, old in zip(weights, own["kept"], strict=True):
                each.data[2].copy_(old)

    _of_steps(module, change)


def tool(module, first, responses):
    """Tools answer the call before."""
    started = module.Conversations._started
    call = module.EnvironmentPool.call
    state = {"asked": 0, "before": None}

    def counted(self, *arguments):
        state["asked"] += 1
        return started(self, *arguments)

    def called(self, *now):
        before, state["before"] = state["before"], now
        is_planted = state["asked"] > (first - 1) * responses
        return call(self, *(before if is_planted and before else now))

    module.Conversations._started = counted
    module.EnvironmentPool.call = called
