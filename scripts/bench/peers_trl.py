"""What peers.py measures of TRL, in TRL's own environment: `peers_trl.py JOB.json`, seconds of each step, and of its
generation and of what TRL does with the answers before the first update, as JSON.

GRPOTrainer with the ratio of whole sequences and its own generation: what somebody with one machine would take.
"""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """When each update ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.ends.append(time.perf_counter())

    def on_step_end(self, args, state, control, **kwargs):
        self.ends.append(time.perf_counter())


def timed(trainer, method: str) -> list[float]:
    """Seconds of each call of the trainer's method from here on."""
    seconds, inner = [], getattr(trainer, method)

    def outer(*args, **kwargs):
        begun = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - begun)

    setattr(trainer, method, outer)
    return seconds


def exact_match(completions, answer, **kwargs):
    return [float(one[0]["content"].strip() == truth) for one, truth in zip(completions, answer, strict=True)]


def main(job: dict) -> dict:
    torch.set_num_threads(job["threads"])
    updates, n = job["updates"], job["n"]
    config = GRPOConfig(
        output_dir=job["folder"], use_cpu=True, bf16=False, report_to=[], save_strategy="no", logging_steps=10**6,
        disable_tqdm=True, learning_rate=1e-5, lr_scheduler_type="constant", max_steps=job["steps"] * updates,
        per_device_train_batch_size=job["prompts"] * n // updates, gradient_accumulation_steps=1,
        steps_per_generation=updates, num_generations=n, max_completion_length=job["tokens"], temperature=1.0,
        beta=0.0, num_iterations=1, importance_sampling_level="sequence", loss_type="grpo", epsilon=1e-2,
        gradient_checkpointing=False, dataloader_num_workers=0, seed=0,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    clock, lengths = Clock(), []

    def reward(completions, completion_ids, answer, **kwargs):
        lengths.extend(map(len, completion_ids))
        return exact_match(completions, answer)

    trainer = GRPOTrainer(
        model, reward, args=config, train_dataset=Dataset.from_list(job["rows"]), processing_class=tokenizer,
        callbacks=[clock],
    )  # fmt: skip
    generation, before_updates = timed(trainer, "_generate"), timed(trainer, "_generate_and_score_completions")
    trainer.train()
    ends = clock.ends[::updates]
    steps = [after - before for before, after in pairwise(ends)]
    return {
        "steps": steps, "mean_length": sum(lengths) / len(lengths), "responses": len(lengths),
        "gen": generation, "before_updates": before_updates,
    }  # fmt: skip


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.with_suffix(".out").write_text(json.dumps(main(json.loads(file.read_text()))))
