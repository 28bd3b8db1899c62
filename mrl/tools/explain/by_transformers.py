"""Engines against transformers: whose log-probs of a step are right, and where a fresh engine's begin to differ.

weights that the step was generated with  --> transformers  --> log-probs of stored tokens: the engines' or the
                                                                ranks' are far from them
                                          --> a fresh engine --> differs as the engines did: the first layer, token
                                                                and expert; or not: the run's engines had something
                                                                else than these weights and arguments
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mrl.checkpoint.convert import write_hf
from mrl.checkpoint.disk_space import free_bytes
from mrl.checkpoint.hf_folder import copy_hf_files
from mrl.checkpoint.manifest import HF_FOLDER, MANIFEST, WEIGHTS_ONLY, Manifest, RankFiles, write_manifest
from mrl.checkpoint.open_checkpoint import Checkpoint, open_mrl
from mrl.config.schema import RunConfig, with_values
from mrl.driver.replay_views import SHOWN_ROWS
from mrl.engine.requests import engine_settings
from mrl.errors import EnvironmentFault
from mrl.model import load_model_spec, parameter_count, with_predicting
from mrl.model.hf_config import without_quantization
from mrl.platforms.hosting import get_hosting
from mrl.record.sample_files import StepFile, read_samples
from mrl.reshard.streams import ITEM_BYTES
from mrl.tools.explain.replay import StoredRun

TOKENS = 16_384  # in all of them together
STATES_BYTES = 1 << 28  # of one side's hidden states
RANKS = "ranks"  # folder of the ranks' files
AGREES = 0.1  # share of the stored difference below which two sides compute the same
# relative difference of a token's hidden state that is no rounding: of residual streams after tens of layers
ROUNDING = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
_NOT_OF_ENGINE = ("data_parallel_size", "data_parallel_rank", "speculative_config", "enable_return_routed_experts")
_LOG = 1500  # characters of a process that failed

States = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class StoredRow:
    """A response as it was stored. `engines`, `ranks`: log-probs of its response tokens; NaN where none was sampled."""

    sample_id: int
    ids: list[int]
    prompt: int
    engines: np.ndarray
    ranks: np.ndarray


@dataclass(frozen=True)
class FirstDifference:
    """Where two passes over the same rows begin to differ. `layer` is -1 before the first, and the number of layers
    after the last one. `part`: embedding, attention, router, experts, feed-forward, layer or output. `token`: the first
    that differs there, counted over all rows. `experts`: those that hold the difference, where known.
    """

    layer: int
    part: str
    token: int
    by: float
    experts: tuple[int, ...] = ()
    chosen: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # by the engine and by transformers, of `token`


@dataclass(frozen=True)
class AgainstTransformers:
    """Mean absolute differences of log-probs from transformers', nats a token. `place`: where a fresh engine begins to
    differ, in words; empty where it agrees.
    """

    engines: float
    ranks: float
    fresh: float  # of a fresh engine, at temperature 1
    responses: int
    place: str


def why_not(config: RunConfig) -> str:
    """Says why engines of a configuration are not compared; empty where they can be."""
    if config.trainer.schedule != "sync":
        return "responses of several versions of the weights are not compared with transformers'"
    if config.algorithm.on_policy:
        return "ranks' log-probs on policy are known after an update only, and not compared with transformers'"
    if config.model.vision is not None:
        return "responses with images are not compared with transformers'"
    if config.actor.lora.rank:
        return "engines with adapters are not compared with transformers'"
    if config.rollout.fp8_block or "quantization" in config.rollout.engine_kwargs.get("vllm", {}):
        return "engines of other number formats are not compared with transformers'"
    if config.rollout.top_p < 1 or config.rollout.top_k > 0:
        return "log-probs of a filtered distribution (rollout.top_p, top_k) are not compared with transformers'"
    return ""


def lacks_room(config: RunConfig, folder: Path, copies: int) -> str:
    """Says that the disk of `folder` does not hold so many copies of the weights; empty if it does."""
    needed = copies * parameter_count(load_model_spec(config.model.path)) * ITEM_BYTES[config.model.dtype]
    free = free_bytes(folder)
    if free >= needed:
        return ""
    return (
        f"{folder.parent} has {free / 1e9:.3g} GB free, and weights of the step take {needed / 1e9:.3g} GB there; set "
        "TMPDIR to a folder on another disk"
    )


def stored_rows(folder: Path, step: int, of_ranks: Mapping[int, Sequence[float]]) -> list[StoredRow]:
    """Returns the responses of a step whose ranks' log-probs are known, the largest difference first. `of_ranks`: of a
    replay, by sample id; empty: those that the run kept (record.trainer_log_probs).
    """
    samples = read_samples(folder, step)
    if not of_ranks:
        gaps = StepFile(folder, step).differences([row["sample_id"] for row in samples])
        of_ranks = {
            row["sample_id"]: np.add(row["rollout_log_probs"], gap)
            for row, gap in zip(samples, gaps, strict=True)
            if gap is not None and len(gap) == len(row["rollout_log_probs"])
        }
    found = [
        StoredRow(
            row["sample_id"],
            [*row["prompt_ids"], *row["response_ids"]],
            len(row["prompt_ids"]),
            np.array(row["rollout_log_probs"], np.float64),
            np.array(of_ranks[row["sample_id"]], np.float64),
        )
        for row in samples
        if row["sample_id"] in of_ranks and len(row["rollout_log_probs"]) == len(row["response_ids"])
    ]  # of several turns: tokens of tools have no log-prob
    return sorted(found, key=lambda row: -float(np.abs(row.engines - row.ranks).mean()))


def against_transformers(
    config: RunConfig, served: Path, rows: Sequence[StoredRow], seconds: float
) -> AgainstTransformers:
    """Computes rows with transformers and a fresh engine of the run's arguments. `served`: a folder in Hugging Face's
    form with the weights that they were generated with.

    Raises EnvironmentFault where one of the two does not run, or not within `seconds`.
    """
    model = load_model_spec(served)
    at_hand = with_values(config, {"model.path": str(served)})
    with tempfile.TemporaryDirectory(prefix="mrl-layers-") as made:
        folder = Path(made)
        given = engine_settings(at_hand, model, 0, folder).arguments
        arguments = {name: value for name, value in given.items() if name not in _NOT_OF_ENGINE}
        arguments |= {"skip_tokenizer_init": True, "enforce_eager": True}  # hooks are not called in captured graphs
        longest = arguments["max_model_len"] - 1  # of a prompt, and one token after it
        told = [row for row in rows if len(row.ids) <= longest]
        if not told:
            raise EnvironmentFault(f"every response of the step is as long as an engine's context ({longest + 1})")
        ends = np.cumsum([len(row.ids) for row in told[:SHOWN_ROWS]])
        told = told[: max(1, int((ends <= TOKENS).sum()))]
        of_token = model.num_layers * (2 * model.hidden_size + model.num_experts) * 4
        watched = max(1, int((ends * of_token <= STATES_BYTES).sum()))
        job = {
            "model": str(served), "dtype": config.model.dtype, "device": config.cluster.device,
            "arguments": arguments, "rows": [row.ids for row in told], "watched": watched,
            "experts": model.num_experts, "temperature": config.rollout.temperature, "out": "states",
        }  # fmt: skip
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        _run(config, folder, seconds)
        theirs, fresh = (_read(folder / f"states.{side}.npz") for side in ("transformers", "vllm"))
    far = [
        (
            np.abs(row.engines - theirs[f"sampled.{number}"][row.prompt - 1 :]),
            np.abs(row.ranks - theirs[f"sampled.{number}"][row.prompt - 1 :]),
            np.abs(fresh[f"row.{number}"] - theirs[f"row.{number}"])[row.prompt - 1 :],
        )
        for number, row in enumerate(told)
    ]
    of_engines, of_ranks, of_fresh = (float(np.nanmean(np.concatenate(each))) for each in zip(*far, strict=True))
    place = ""
    if of_fresh > AGREES * max(of_engines, of_ranks):
        rounding = max(ROUNDING.get(name, 0.1) for name in (config.model.dtype, config.rollout_dtype))
        found = first_difference(fresh, theirs, model.num_layers, model.num_experts_per_tok, rounding)
        place = in_words(found, model.num_layers, told)
    return AgainstTransformers(of_engines, of_ranks, of_fresh, len(told), place)


def _run(config: RunConfig, folder: Path, seconds: float) -> None:
    hosting = get_hosting(config.cluster.device)
    workers = config.rollout.tensor_model_parallel_size
    environment = os.environ | hosting.engine_environment(0, 1, workers, config.rollout.cpu_kvcache_gib)
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "mrl.engine.layer_states", str(folder / "job.json")],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise EnvironmentFault(f"was not done after {seconds / 60:.0f} minutes (--minutes)") from None
        finally:
            with suppress(ProcessLookupError):  # workers of an engine that failed
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code:
        raise EnvironmentFault(log.read_text(errors="replace")[-_LOG:].rstrip())


def _read(file: Path) -> dict[str, np.ndarray]:
    with np.load(file, allow_pickle=False) as found:
        return dict(found)


def _far(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Returns the difference of each token's vector as a share of its length."""
    size = np.linalg.norm(other.astype(np.float64), axis=-1)
    return np.linalg.norm(one.astype(np.float64) - other, axis=-1) / np.maximum(size, 1e-30)


def first_difference(one: States, other: States, layers: int, chosen: int, rounding: float) -> FirstDifference:
    """Returns where the states of an engine, `one`, first differ from transformers', `other`, by more than `rounding`.

    `chosen`: experts of a token.
    """
    order = [("embedded", -1, "embedding")]
    for layer in range(layers):
        order += [(f"attention.{layer}", layer, "attention"), (f"layer.{layer}", layer, "layer")]
    for key, layer, part in order:
        if key not in one or key not in other or one[key].shape != other[key].shape:
            continue
        far = _far(one[key], other[key])
        tokens = np.flatnonzero(far > rounding)
        if not len(tokens):
            continue
        token = int(tokens[0])
        place = FirstDifference(layer, part, token, float(far[token]))
        if part == "layer" and f"attention.{layer}" in one:
            return _in_experts(place, far > rounding, one, other, chosen)
        return place
    return FirstDifference(layers, "output", 0, 0.0)


def _in_experts(place: FirstDifference, is_far: np.ndarray, one: States, other: States, chosen: int) -> FirstDifference:
    """Says of a layer whose attention agrees what differs after it: the choice of experts, or single ones."""
    key = f"router.{place.layer}"
    if key not in one or key not in other or not chosen:
        return FirstDifference(place.layer, "feed-forward", place.token, place.by)
    ours, theirs = (np.sort(np.argsort(-each[key], axis=-1)[:, :chosen], axis=-1) for each in (one, other))
    both = tuple(ours[place.token].tolist()), tuple(theirs[place.token].tolist())
    if (ours[is_far] != theirs[is_far]).any(axis=-1).mean() > 0.5:
        return FirstDifference(place.layer, "router", place.token, place.by, chosen=both)
    of_expert = np.array([(theirs == expert).any(axis=-1) for expert in range(other[key].shape[-1])])
    # an expert holds the difference if no token that it got agrees
    holds = [
        expert for expert, got in enumerate(of_expert) if got.any() and is_far[got].all() and not is_far[~got].all()
    ]
    least = _fewest(of_expert, holds, is_far)
    return FirstDifference(place.layer, "experts", place.token, place.by, least, both)


def _fewest(of_expert: np.ndarray, holds: Sequence[int], is_far: np.ndarray) -> tuple[int, ...]:
    """Returns the fewest of some experts that got all tokens that differ, by taking the one with the most in turn."""
    left, found = is_far.copy(), []
    while left.any() and holds:
        best = max(holds, key=lambda expert: int((of_expert[expert] & left).sum()))
        if not (of_expert[best] & left).any():
            return ()
        found.append(best)
        left &= ~of_expert[best]
    return () if left.any() else tuple(sorted(found))


def in_words(place: FirstDifference, layers: int, rows: Sequence[StoredRow]) -> str:
    """Says where two passes over rows begin to differ."""
    if place.layer >= layers:
        return "all layers agree: what comes after the last one differs (norm, output layer, logits)"
    ends = np.cumsum([len(row.ids) for row in rows])
    row = int(np.searchsorted(ends, place.token, "right"))
    token = place.token - (int(ends[row - 1]) if row else 0)
    at = f"at token {token} of response {rows[row].sample_id}, by {place.by:.1%}"
    if place.layer < 0:
        return f"the embedding is the first that differs, {at}"
    where = f"layer {place.layer} is the first that differs, {at}: "
    if place.part == "attention":
        return where + "its attention (positions, masks, scale, norms of queries and keys)"
    if place.part == "router":
        ours, theirs = (", ".join(map(str, each)) for each in place.chosen)
        return where + f"its router, which chose experts {ours}, and in transformers {theirs}"
    if place.experts:
        several = "experts" if len(place.experts) > 1 else "expert"
        return where + f"its {several} {', '.join(map(str, place.experts))}, whose tokens all differ, and others agree"
    if place.part == "experts":
        return where + "its experts, while attention and router agree"
    return where + ("its feed-forward part, while attention agrees" if place.part == "feed-forward" else "all of it")


def differences(found: AgainstTransformers) -> str:
    """Returns how far the three sides are from transformers, in words."""
    return (
        f"mean differences from transformers' log-probs with the weights that were served, of {found.responses} "
        f"responses: engines' {found.engines:.2g}, ranks' {found.ranks:.2g}, a fresh engine's {found.fresh:.2g} nats a "
        "token"
    )


def verdict(found: AgainstTransformers) -> tuple[str, str, str, str] | None:
    """Returns kind, cause, evidence and cure: whose log-probs are not those that transformers computes. None where
    neither side is twice as far as the other, as rounding is.
    """
    evidence = differences(found)
    if found.engines < found.ranks / 2:
        cause = "the ranks compute other probabilities than transformers, and engines do not"
        cure = "compare model.override_transformer_config and model.* with config.json, and try mrl family check"
        return "ranks", cause, evidence, cure
    if found.ranks >= found.engines / 2:
        return None
    if found.place and found.fresh > found.engines / 2:
        cause = f"engines compute other probabilities than transformers; {found.place}"
        cure = "a fresh engine has it, too: compare rollout.* and its arguments with config.json"
        return "engines", cause, evidence, cure
    less = "is nearer to it" if found.place else "does not"
    cause = f"engines computed other probabilities than transformers, and a fresh engine with these weights {less}"
    cure = (
        "what the run's engines had were not these weights and arguments: look at reshard/verified and "
        "logs/engine-N.log, and restart them"
    )
    return "engines", cause, evidence, cure


def folder_of_weights(run: StoredRun, step: int, work: Path, parts: Sequence[Mapping[str, Any]]) -> Path | None:
    """Returns a folder in Hugging Face's form with the weights that a step was generated with; None where nothing has
    them. `work`: an empty folder, or one with RANKS, in which ranks of a replay wrote them, with their `parts`.
    Raises EnvironmentFault before it copies a checkpoint to a disk without room for it.
    """
    out = work / "hf"
    if parts:
        write_hf(opened(run.config, work / RANKS, parts), out)
        return out
    if step == 1 and not load_model_spec(run.config.model.path).loads_by_sync:
        return Path(run.config.model.path)
    kept = run.folder.checkpoints / f"step-{step - 1}"
    if not (kept / MANIFEST).is_file():
        return None
    if full := lacks_room(run.config, work, 1):
        raise EnvironmentFault(full)
    write_hf(open_mrl(kept), out)
    return out


def opened(config: RunConfig, work: Path, parts: Sequence[Mapping[str, Any]]) -> Checkpoint:
    """Opens the weights that ranks wrote into `work`. `parts`: their descriptions."""
    source = Path(config.model.path)
    (work / HF_FOLDER).mkdir()
    hf_files = copy_hf_files(source, work / HF_FOLDER)
    hf_config = without_quantization(json.loads((source / "config.json").read_text(encoding="utf-8")))
    hf_config = with_predicting(hf_config, config.actor.mtp.train)
    layout = config.actor.layout.model_dump()
    manifest = Manifest(
        0, layout, config.model.dtype, hf_config, tuple(map(RankFiles.from_json, parts)), {"converted": WEIGHTS_ONLY},
        {}, hf_files,
    )  # fmt: skip
    write_manifest(work, manifest)
    return open_mrl(work)
