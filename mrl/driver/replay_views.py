"""Other ways in which generation may have computed a step's log-probs, tried on the ranks of a replay.

Engines gave a log-prob for each token that they sampled. The ranks compute these tokens with one thing changed: if
the differences are gone, engines had that. Views are plain data, `{"kind": ..., ...}`:

    own          nothing is changed
    temperature  `value` in place of rollout.temperature
    version      weights of an earlier version `value`; 0 are the model's
    expert       one expert (`layer`, `expert`) of an earlier version `value`
    router       routers round to bfloat16
    rounded      all weights are rounded to bfloat16
    rotation     positions turn by another stretch, `stretch` with its arguments (mrl.model.rotation)
    softmax      the scale of attention is `value` times the model's
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mrl.config.schema import with_values
from mrl.config.schema_actor import OPTIMIZER, PARAMETERS
from mrl.model.rotation import Linear, Yarn

View = Mapping[str, Any]
Weights = dict[str, Any]  # tensor by a rank's name of the parameter
KEPT = 3  # earlier versions of the weights that a replay keeps
SHOWN_ROWS = 32  # whose log-probs a replay returns
MOST_EXPERTS = 128  # of all layers, up to which each one is tried
_EXPERT = re.compile(r"layers\.(\d+)\..*experts\.(\d+)\.")
_FACTORS = (2.0, 4.0, 8.0)
_SEARCHED = {"temperature": (0.25, 4.0), "softmax": (0.25, 4.0)}  # times what is configured
_GOLDEN = 0.381966
_SECTIONS = 8  # of the stretch between two of the first numbers, which leave a fiftieth of it
_NEAR = (-0.5, -0.2, -0.08, -0.03)  # shares of half of the range: the first numbers on one side of the middle
_EXPLAINED = 0.1  # of the difference may be left where a view is the answer


def weights_of(actor: Any) -> Weights:
    """Copies this rank's weights to the host."""
    from mrl.rank.rank_parameters import rank_parameters

    with actor.residence.using(PARAMETERS, OPTIMIZER):
        return {each.key: each.parameter.detach().to("cpu", copy=True) for each in rank_parameters(actor)}


def views_of(actor: Any, older: Mapping[int, Weights]) -> list[View]:
    """Returns the views without a number to search, and without those of experts. `older`: weights by version."""
    found: list[View] = [{"kind": "router"}] if actor.model.is_moe else []
    found.append({"kind": "rounded"})
    longest = actor.model.max_position_embeddings
    for factor in _FACTORS:
        found.append({"kind": "rotation", "stretch": ["linear", {"factor": factor}]})
        for original in sorted({longest, int(longest / factor)}):
            given = {"factor": factor, "original_max_position_embeddings": original}
            found.append({"kind": "rotation", "stretch": ["yarn", given]})
    for version in sorted(older, reverse=True):
        found.append({"kind": "version", "value": version})
    return found


def experts_of(actor: Any, older: Mapping[int, Weights]) -> list[View]:
    """Returns a view for each expert and version; none where there are more than MOST_EXPERTS."""
    model = actor.model
    if not model.is_moe or len(model.moe_layers) * model.num_experts > MOST_EXPERTS:
        return []
    return [
        {"kind": "expert", "layer": layer, "expert": expert, "value": version}
        for version in sorted(older, reverse=True)[:KEPT]
        for layer in model.moe_layers
        for expert in range(model.num_experts)
    ]


@contextmanager
def viewed(actor: Any, view: View, older: Mapping[int, Weights]) -> Iterator[None]:
    """Changes the actor as a view says, and back."""
    with ExitStack() as undo:
        if view["kind"] != "own":
            _CHANGES[view["kind"]](actor, view, older, undo)
        yield


def _temperature(actor: Any, view: View, older: Mapping[int, Weights], undo: ExitStack) -> None:
    usual = actor.config
    undo.callback(setattr, actor, "config", usual)
    actor.config = with_values(usual, {"rollout.temperature": view["value"]})


def _set_weights(actor: Any, undo: ExitStack, change: Callable[[Any], None]) -> None:
    """Calls `change(parameter)` of each, whose weights are put back afterwards."""
    from mrl.rank.rank_parameters import rank_parameters

    undo.enter_context(actor.residence.using(PARAMETERS))  # on the device until they are put back
    with actor.residence.using(PARAMETERS, OPTIMIZER):
        parameters = list(rank_parameters(actor))
    for each in parameters:
        own = each.parameter.data
        before = own.clone()
        undo.callback(own.copy_, before)
        change(each)


def _version(actor: Any, view: View, older: Mapping[int, Weights], undo: ExitStack) -> None:
    weights = older[view["value"]]
    _set_weights(actor, undo, lambda each: each.parameter.data.copy_(weights[each.key]))


def _rounded(actor: Any, view: View, older: Mapping[int, Weights], undo: ExitStack) -> None:
    import torch

    _set_weights(actor, undo, lambda each: each.parameter.data.copy_(each.parameter.data.to(torch.bfloat16)))


def _expert(actor: Any, view: View, older: Mapping[int, Weights], undo: ExitStack) -> None:
    weights = older[view["value"]]

    def change(each: Any) -> None:
        for piece in each.shard.pieces:
            found = _EXPERT.search(piece.hf_name)
            if found and (int(found[1]), int(found[2])) == (view["layer"], view["expert"]):
                place = piece.local_box.slices
                each.parameter.data[place].copy_(weights[each.key][place])

    _set_weights(actor, undo, change)


def _router(actor: Any, view: View, older: Mapping[int, Weights], undo: ExitStack) -> None:
    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    def rounded(own: Callable[[Any], Any], values: Any) -> Any:
        logits = own(values.to(torch.bfloat16).to(values.dtype))
        return logits.to(torch.bfloat16).to(logits.dtype)

    for module in _modules(actor, TopKRouter):
        module.gating = partial(rounded, module.gating)
        undo.callback(delattr, module, "gating")


def _softmax(actor: Any, view: View, older: Mapping[int, Weights], undo: ExitStack) -> None:
    for chunk in actor.chunks:
        for module in chunk.modules():
            if hasattr(module, "softmax_scale"):
                usual = module.softmax_scale
                size = actor.model.head_dim**-0.5
                undo.callback(setattr, module, "softmax_scale", usual)
                module.softmax_scale = view["value"] * (size if usual is None else usual)


def _rotation(actor: Any, view: View, older: Mapping[int, Weights], undo: ExitStack) -> None:
    from megatron.core.utils import unwrap_model

    from mrl.rank.rotary import set_rotation

    name, given = view["stretch"]
    stretch = {"linear": Linear, "yarn": Yarn}[name](**given)
    model = replace(actor.model, rotation=replace(actor.model.rotation, stretch=stretch))
    fields = ("yarn_rotary_scaling_factor", "yarn_mscale", "yarn_mscale_all_dim")
    for chunk in unwrap_model(actor.chunks):
        if not hasattr(chunk, "rotary_pos_emb"):
            continue
        module = chunk.rotary_pos_emb
        undo.callback(_forget, module)
        undo.callback(setattr, module, "inv_freq", module.inv_freq)
        for field in fields:
            if hasattr(chunk.config, field):
                undo.callback(setattr, chunk.config, field, getattr(chunk.config, field))
            else:
                undo.callback(chunk.config.__dict__.pop, field, None)
        set_rotation(model, chunk)
        _forget(module)


def _forget(module: Any) -> None:
    """Empties Megatron's cache of angles, which knows lengths and no frequencies."""
    for name in ("forward", "get_emb", "get_cos_sin"):
        getattr(getattr(type(module), name, None), "cache_clear", lambda: None)()


def _modules(actor: Any, kind: type) -> list[Any]:
    return [module for chunk in actor.chunks for module in chunk.modules() if isinstance(module, kind)]


_CHANGES: dict[str, Callable[[Any, View, Mapping[int, Weights], ExitStack], None]] = {
    "temperature": _temperature,
    "version": _version,
    "expert": _expert,
    "router": _router,
    "rounded": _rounded,
    "rotation": _rotation,
    "softmax": _softmax,
}


Gaps = tuple[np.ndarray, np.ndarray]  # sum of absolute differences of log-probs, and tokens; [rows]


def compared_views(
    actor: Any,
    older: Mapping[int, Weights],
    gaps: Callable[[], Gaps],
    has_time: Callable[[], bool] = lambda: True,
    floor: float = 0.0,
) -> list[dict[str, Any]]:
    """Returns each view with `gap`: mean absolute difference of log-probs from generation's, nats a token.

    `gaps()` computes those of each row. In `fits` a row takes the better of the view and of the step's own model, since
    one engine of several may differ. The first view is the step's own model. Numbers are searched where nothing else
    gives generation's log-probs, and then single experts are tried. What `has_time` leaves no time for is `late`.
    Where the own gap is not above `floor`, nothing else is tried.
    """
    base, tokens = gaps()
    count = max(int(tokens.sum()), 1)
    answers = [{"kind": "own", "gap": float(base.sum() / count), "fits": float(base.sum() / count)}]

    if answers[0]["gap"] <= floor:
        return answers

    def tried(view: View) -> dict[str, Any]:
        if not has_time():
            return dict(view) | {"late": True}
        try:
            with viewed(actor, view, older):
                found, _ = gaps()
        except Exception as error:  # a model may lack what a view changes
            return dict(view) | {"failed": f"{type(error).__name__}: {error}"}
        return dict(view) | {"gap": float(found.sum() / count), "fits": float(np.minimum(found, base).sum() / count)}

    def is_found() -> bool:
        return min(each.get("fits", np.inf) for each in answers) <= _EXPLAINED * answers[0]["fits"]

    answers += map(tried, views_of(actor, older))
    for kind, (low, high) in _SEARCHED.items() if not is_found() else ():
        usual = actor.config.rollout.temperature if kind == "temperature" else 1.0
        answers.append(_searched(kind, low * usual, high * usual, tried))
    if not is_found():
        answers += map(tried, experts_of(actor, older))
    return answers


def fitting(views: Sequence[View]) -> list[View]:
    """Returns the views that leave at most half of the difference of the step's own model, which is the first of them,
    the best first.
    """
    if not views or "gap" not in views[0]:
        return []
    best = sorted((view for view in views[1:] if "fits" in view), key=lambda view: view["fits"])
    return [view for view in best if view["fits"] <= views[0]["gap"] / 2]


def _searched(kind: str, low: float, high: float, tried: Callable[[View], dict[str, Any]]) -> dict[str, Any]:
    """Returns the best view of a kind: of a few numbers on both sides of the middle, then by golden section around the
    best of them, over the logarithm.

    A view that fits no row better than the ranks' own has the same `fits` as any other, so a section alone would be led
    astray by ties.
    """
    found: dict[float, dict[str, Any]] = {}

    def fits(place: float) -> float:
        place = round(place, 9)
        if place not in found:
            found[place] = tried({"kind": kind, "value": float(np.exp(place))})
        return found[place].get("fits", np.inf)

    middle, half = float(np.log(low * high)) / 2, float(np.log(high / low)) / 2
    places = [middle + half * share for share in (-1, *_NEAR, *(-share for share in reversed(_NEAR)), 1)]
    best = min(range(len(places)), key=lambda i: fits(places[i]))
    first, last = places[max(0, best - 1)], places[min(len(places) - 1, best + 1)]
    for _ in range(_SECTIONS):
        left, right = first + _GOLDEN * (last - first), last - _GOLDEN * (last - first)
        if not np.isfinite(fits(left) + fits(right)):
            break
        first, last = (first, right) if fits(left) < fits(right) else (left, last)
    return min(found.values(), key=lambda each: each.get("fits", np.inf))
