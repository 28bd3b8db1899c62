"""Transformers' log-probs of stored rows, each token's by the version of the weights that its row names."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM
from world import succeeded

Models = Mapping[int, torch.nn.Module]


def models_of(run_dir: Path, start: Path, versions: Iterable[int], folder: Path) -> Models:
    """The start's model (version 0) and the run's checkpoints, converted below the folder."""
    models = {}
    for version in versions:
        model = start
        if version:
            model = folder / str(version)
            succeeded("convert", "megatron-to-hf", str(run_dir / "checkpoints" / f"step-{version}"), "-o", str(model))
        models[version] = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return models


def rows_of(run_dir: Path, step: int) -> list[Mapping]:
    return pq.read_table(run_dir / "samples" / f"step-{step}.parquet").to_pylist()


def check_row(row: Mapping, models: Models) -> int:
    """Asserts that the engine said what transformers says, to 1e-4. Returns how many versions made its tokens."""
    ids = torch.tensor(row["prompt_ids"] + row["response_ids"])
    before = len(row["prompt_ids"])
    of_tokens = version_of_tokens(row)
    sampled = torch.ones(len(of_tokens), dtype=torch.bool)
    if row.get("sampled") is not None:
        sampled = torch.tensor(row["sampled"])
    given = torch.tensor(row["rollout_log_probs"])
    versions = set(of_tokens[sampled].tolist())
    for version in versions:
        with torch.no_grad():
            log_probs = models[version](ids[None]).logits[0].log_softmax(-1)
        said = log_probs[before - 1 : -1].gather(-1, ids[before:, None])[:, 0]
        own = sampled & (of_tokens == version)
        assert (said - given)[own].abs().max() < 1e-4, f"sample {row['sample_id']}, version {version}"
    return len(versions)


def version_of_tokens(row: Mapping) -> torch.Tensor:
    """int64 [response tokens]: the version that made each."""
    versions = torch.empty(len(row["response_ids"]), dtype=torch.int64)
    for span in row["weight_version"]:
        versions[span["first_token"] :] = span["version"]
    return versions
