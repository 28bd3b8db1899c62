"""After a sync an engine is bit-equal to a fresh one that loaded an HF export of the same weights, and generates the same bits."""

import shutil
from pathlib import Path

import perturbing
import pytest
import ray
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save, tiny_moe

from mrl.cluster.actor_group import ActorGroup
from mrl.cluster.ray_cluster import ray_cluster
from mrl.cluster.rollout_group import RolloutGroup
from mrl.config.schema import RunConfig
from mrl.rollout.types import Request, Sampling

FACTOR = 1.25
ray.cloudpickle.register_pickle_by_value(perturbing)  # workers cannot import a test's helpers


def config_for(model: Path, dtype: str, layout: dict, engines: int, tensor: int) -> RunConfig:
    return RunConfig.model_validate({
        "model": {"path": str(model), "dtype": dtype},
        "actor": {"layout": layout, "ppo_mini_batch_size": 4},
        "data": {"train_batch_size": 4, "max_prompt_length": 32, "max_response_length": 16},
        "rollout": {
            "num_engines": engines, "tensor_model_parallel_size": tensor, "max_num_seqs": 32,
            "engine_kwargs": {"vllm": {"skip_tokenizer_init": True}},
        },
        "cluster": {"device": "cpu", "cpus_per_actor": 0.1, "cpus_per_engine": 0.1},
    })  # fmt: skip


def three_models(folder: Path, dtype: torch.dtype) -> tuple[Path, Path, Path]:
    """Checkpoints: what the trainer starts from, the same with every weight scaled, and other weights altogether."""
    model = tiny_moe().to(dtype)
    start = save(model, folder / "start")
    weights = load_file(start / "model.safetensors")
    scaled, other = folder / "scaled", folder / "other"
    shutil.copytree(start, scaled)
    save_file({k: v * FACTOR for k, v in weights.items()}, scaled / "model.safetensors", {"format": "pt"})
    shutil.copytree(start, other)
    noise = torch.Generator().manual_seed(1)
    save_file(
        {k: v + torch.randn(v.shape, generator=noise).to(v.dtype) for k, v in weights.items()},
        other / "model.safetensors",
        {"format": "pt"},
    )
    return start, scaled, other


def answers(group: RolloutGroup) -> list:
    """Tokens and log-probs of fixed requests; every engine of the group answers some."""
    requests = [Request(i, tuple(3 + (7 * i + j) % 100 for j in range(3 + i % 9)), i) for i in range(24)]
    done = group.generate(requests, Sampling(1.0, 12, ()), lambda batch: None)
    return [(c.token_ids, c.log_probs) for c in done]


def weights_of(fingerprints: dict[str, str]) -> dict[str, str]:
    """Without what no sync writes: tables computed from the configuration, and the empty parameters that packed linears leave."""
    packed = {name.removesuffix(".<packed>") for name in fingerprints if name.endswith(".<packed>")}
    left = {f"{name}.weight" for name in packed if "lm_head" not in name and "embed_tokens" not in name}
    return {k: v for k, v in fingerprints.items() if "rotary_emb" not in k and not k.endswith("_scale") and k not in left}


def equal(a: dict[str, str], b: dict[str, str]) -> list[str]:
    """Names under which both hold the same bits."""
    assert a.keys() == b.keys()
    return [name for name in a if a[name] == b[name]]


@pytest.mark.real
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("dtype", "layout", "engines", "tensor"),
    [
        ("float32", dict(world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, expert_model_parallel_size=2), 2, 1),
        ("bfloat16", dict(world_size=2, tensor_model_parallel_size=2, expert_model_parallel_size=2), 1, 2),
    ],
    ids=["fp32-tp2pp2ep2-to-two-engines", "bf16-tp2ep2-to-tp2"],
)
def test_engine_equals_a_fresh_one_after_every_sync(tmp_path, dtype, layout, engines, tensor):
    start, scaled, other = three_models(tmp_path, getattr(torch, dtype))
    config = config_for(start, dtype, layout, engines, tensor)
    with ray_cluster(config):
        synced = RolloutGroup(config_for(other, dtype, layout, engines, tensor), tmp_path / "synced")
        fresh = [RolloutGroup(config_for(model, dtype, layout, 1, tensor), tmp_path / model.name) for model in (start, scaled)]
        try:
            actor = ActorGroup(config, tmp_path / "actor", None, worker=perturbing.PerturbingWorker)
            for group in (synced, *fresh):
                group.wait_started()
            truth = [weights_of(group.fingerprints()[0]) for group in fresh]
            assert equal(truth[0], truth[1]) == [], "the two targets must differ in every weight"
            for held in synced.fingerprints():
                assert equal(weights_of(held), truth[0]) == [], "the engines must start from other weights"
            for version, (group, expected) in enumerate(zip(fresh, truth, strict=True), 1):
                if version == 2:
                    actor.call("scale_weights", FACTOR)
                synced.update_weights(actor.export_buckets(64 * 1024), version)
                for held in synced.fingerprints():
                    assert weights_of(held) == expected
                assert answers(synced) == answers(group)
            actor.stop()
        finally:
            for group in (synced, *fresh):
                group.stop()
    assert not list(Path("/dev/shm").glob("mrl-sync-*"))
