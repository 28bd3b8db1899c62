"""Judges a family with faults in its rows, one after another, as `mrl family check` does: by vLLM's loader or on one
rank.

python family_mutants.py loader|ranks JOB.json

Each mutant changes the family as a slip of its author would. What names it is written: a tensor, a parameter, a
log-prob, a gradient, or an error that the trainer itself raises.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import mrl.model.registry as registry
from mrl.config.schema import RunConfig
from mrl.model.layout import RolloutLayout
from mrl.model.tensors import tensor_specs
from mrl.model.weight_map import Family, Weight
from mrl.process.free_ports import free_port
from mrl.tools.family.check import GRADIENTS, LOG_PROBS, run_config

Rows = tuple[Weight, ...]


def row_mutants(rows: Rows, rng: random.Random) -> Iterator[tuple[str, Callable[[Rows], Rows]]]:
    """Slips in the rows of a layer: name -> what makes them."""

    def at(place: int, change: Callable[[Weight], Weight]) -> Callable[[Rows], Rows]:
        return lambda found: (*found[:place], change(found[place]), *found[place + 1 :])

    for place, row in enumerate(rows):
        name = row.parts[0].name
        yield f"without {name}", lambda found, p=place: (*found[:p], *found[p + 1 :])
        if len(row.parts) > 1:
            first, second, *others = row.parts
            turned = (second, first, *others)
            yield f"{name} after the next part", at(place, lambda r, parts=turned: replace(r, parts=parts))
        if len(row.parts[0].shape) == 2 and len(set(row.parts[0].shape)) == 2:
            flipped = tuple(replace(part, shape=part.shape[::-1]) for part in row.parts)
            yield f"{name} transposed", at(place, lambda r, parts=flipped: replace(r, parts=parts))
        alike = [other for other in rows if other is not row and shapes(other) == shapes(row) and not row.is_expert]
        if alike:
            other = rng.choice(alike)
            yield (
                f"{name} in the place of {other.parts[0].name} in Megatron",
                lambda found, a=row, b=other: tuple(
                    replace(r, megatron={a: b, b: a}[r].megatron) if r in (a, b) else r for r in found
                ),
            )


def shapes(row: Weight) -> tuple:
    return tuple(part.shape for part in row.parts)


def spec_mutants(model) -> Iterator[tuple[str, dict]]:
    """Slips in reading config.json: name -> the fields that they change."""
    yield "epsilon", {"rms_norm_eps": model.rms_norm_eps * 1e4}
    yield "base of the rotation", {"rotation": replace(model.rotation, rope_theta=model.rotation.rope_theta / 50)}
    if not model.is_latent:  # whose heads have sizes and norms of their own, and no biases: nothing reads these
        share = model.rotation.partial_rotary_factor / 2
        yield "half of the rotation", {"rotation": replace(model.rotation, partial_rotary_factor=share)}
        yield "norms of heads", {"qk_norm": not model.qk_norm}
        yield "biases", {"qkv_bias": not model.qkv_bias}
    yield "tied embeddings", {"tie_word_embeddings": not model.tie_word_embeddings}
    if model.is_moe:
        if model.router_score == "softmax":  # Megatron's sigmoid router always makes them so
            yield "router weights that sum to one", {"norm_topk_prob": not model.norm_topk_prob}
        yield "experts of a token", {"num_experts_per_tok": model.num_experts_per_tok + 1}
        yield "factor of the experts", {"routed_scaling_factor": model.routed_scaling_factor * 1.5}
        yield "a dense first layer", {"moe_layers": model.moe_layers[1:]}


def by_loader(folder: Path, words: int) -> str:
    """What vLLM's loader has otherwise with the present rows; empty if nothing."""
    from mrl.engine.loader_check import differences

    try:
        return next(iter(differences(folder, RolloutLayout(1, 1))), "")
    except Exception as error:  # of vLLM or of the description: it is noticed
        return f"{type(error).__name__}: {error}"


def by_ranks(folder: Path, words: int) -> str:
    """What transformers has otherwise than Megatron with the present rows; empty if nothing."""
    from mrl.rank.actor import MegatronActor
    from mrl.rank.family_ranks import closed, compared

    config = RunConfig.model_validate(run_config(str(folder), {"world_size": 1}))
    actor = None
    try:
        actor = MegatronActor(config, 0, 1, "127.0.0.1", free_port())
        found = compared(actor, folder, words)
    except Exception as error:  # of Megatron or of the trainer's own checks: it is noticed
        return f"{type(error).__name__}: {error}"
    finally:
        closed(actor)
    faults = [*found["parameters"], *found["names"], *found["bits"]]
    if not found["log_probs"] < LOG_PROBS:
        faults.append(f"log-probs: {found['log_probs']:.1e}")
    faults += [f"{name}: {off:.1e}" for name, off in found["gradients"].items() if not off < GRADIENTS]
    return faults[0] if faults else ""


JUDGES = {"loader": by_loader, "ranks": by_ranks}  # each in a process of its own, as their packages want it


def mutants(family: Family, config: dict, rng: random.Random) -> Iterator[tuple[str, Family]]:
    model = family.read(config)
    layers = ["expert_layer" if model.is_moe else "dense_layer", *["linear_layer"] * model.is_hybrid]
    for layer in layers:
        build = getattr(family, layer)
        for name, change in row_mutants(build(model), rng):
            yield name, replace(family, **{layer: lambda m, b=build, change=change: change(b(m))})
    yield "vLLM's modules in reverse", replace(family, vllm_order=family.vllm_order[::-1])
    for name, fields in spec_mutants(model):
        yield name, replace(family, read=lambda c, fields=fields: replace(family.read(c), **fields))


def main(judge: str, job: Path) -> None:
    described = json.loads(job.read_text())
    found = {}
    for case in described["cases"]:
        folder = Path(case["folder"])
        config = json.loads((folder / "config.json").read_text())
        (architecture,) = config["architectures"]
        right = registry.FAMILIES[architecture]
        rng = random.Random(1)
        drawn = list(mutants(right, config, rng))
        rng.shuffle(drawn)
        for name, wrong in [("none", right), *drawn[: case["mutants"]]]:
            registry.FAMILIES[architecture] = wrong
            registry.weight_map.cache_clear()
            tensor_specs.cache_clear()
            found[f"{right.model_type}: {name}"] = JUDGES[judge](folder, case["words"])
            job.with_suffix(f".{judge}").write_text(json.dumps(found, indent=1))
        registry.FAMILIES[architecture] = right


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
