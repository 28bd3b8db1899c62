"""A run directory as `mrl train` leaves it, written by its own parts: for tests of pages about runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

from mrl.config.load import load_config
from mrl.data.samples import Sample, packed
from mrl.record.run_dir import RunDir
from mrl.record.sample_files import write_samples
from mrl.record.sinks import JsonlSink

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "</script></pre><script>window.hurt = 1</script><img src=x onerror='window.hurt=1'>\u2028<!--"
WORDS = ("4", "+", "8", "=", HOSTILE)


@dataclass(frozen=True)
class World:
    """What a run directory is to hold. `held_out`: step -> scores of prompts, one response each, `held_out_acc` how
    right they are.
    """

    steps: int = 6
    total: int = 6
    settings: Sequence[str] = ()
    metrics: Mapping[str, Sequence[float]] | None = None
    held_out: Mapping[int, Sequence[float]] | None = None
    held_out_acc: Mapping[int, Sequence[float]] | None = None
    with_samples: bool = True
    sample_ids: Sequence[int] = range(6)  # of the rows of the samples' file


def write_run(path: Path, world: World = World()) -> RunDir:
    """Writes it and gives the lock back, as a run that has ended."""
    model = path.parent / "model"
    model.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, "4"))
    tokenizer.decoder = Fuse()  # words stand together as they are
    tokenizer.save(str(model / "tokenizer.json"))
    settings = [f"model.path={model}", f"trainer.total_training_steps={world.total}", *world.settings]
    resolved = load_config(ROOT / "parallel_configs" / "tiny-moe" / "cpu.yaml", overrides=settings)
    run = RunDir.open(path, resolved.to_yaml())
    sink = JsonlSink(run.metrics)
    for step in range(1, world.steps + 1):
        sink.write(step, _row(step) | {name: values[step - 1] for name, values in (world.metrics or {}).items()})
    sink.close()
    for step, scores in (world.held_out or {}).items():
        _write_validation(run, step, scores, (world.held_out_acc or {}).get(step))
    if world.with_samples and world.steps:
        write_samples(
            run.samples,
            world.steps,
            [packed([replace(_sample(row), sample_id=id) for row, id in enumerate(world.sample_ids)])],
            [_reward(row) for row in range(len(world.sample_ids))],
        )
    run.close()
    return run


def _row(step: int) -> dict[str, float]:
    phases = {"gen": 2.0, "old_log_prob": 0.5, "update_actor": 1.0 + step / 100, "reshard": 0.25, "outside": 0.01}
    return {
        "critic/score/mean": step / 10 + 1 / 3, "actor/entropy": 2.0 - step / 50, "actor/pg_clipfrac": 0.1,
        "rollout_corr/k3_kl": 1e-7 * step,
        "response_length/mean": 3.0, "response_length/clip_ratio": 0.0, "reshard/verified": 1.0,
        "reshard/seconds": 0.25,
        "reshard/bytes_moved": 4e6, "reshard/bytes_required": 4e6, "reshard/weight_version": float(step),
        "perf/cpu_memory_used_gb": 4.5,
        "timing_s/step": sum(phases.values()), **{f"timing_s/{name}": seconds for name, seconds in phases.items()},
    }  # fmt: skip


def _sample(row: int) -> Sample:
    return Sample(
        prompt_id=row // 2, group_id=row // 2, sample_id=row, seed=row, prompt_ids=np.array([0, 1, 0, 3], np.int32),
        response_ids=np.array([2, 4], np.int32), rollout_log_probs=np.array([-0.5, -3.0 - row], np.float32),
        stop_reason="stop",
        weight_version=5,
    )  # fmt: skip


def _reward(row: int) -> dict[str, float | str]:
    return {"score": row / 5, "reason": "ok", "note": HOSTILE}


def _write_validation(run: RunDir, step: int, scores: Sequence[float], accs: Sequence[float] | None) -> None:
    run.validation.mkdir(exist_ok=True)
    rows = [
        {
            "data_source": "sum", "prompt_id": i, "sample_id": 0, "input": f"{i}+1=", "output": f"{step} "
            f"{HOSTILE}", "gts": "2",
            "score": score, "reason": "ok", "reward": {} if accs is None else {"acc": accs[i]},
        }
        for i, score in enumerate(scores)
    ]  # fmt: skip
    (run.validation / f"step-{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
