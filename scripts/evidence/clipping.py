"""How much of the same batch GSPO and GRPO clip: stored rollouts, real updates of one actor, both fractions on the same
log-ratios.

    python scripts/evidence/clipping.py --world long-world --json docs/results/clipping.json \\
        --plot docs/results/clipping.png

Responses are sampled once from the world's checkpoint and scored; the actor is then updated on them with GRPO's loss,
once for each learning rate from the same start, and after each update the log-ratios of all tokens to the sampling
policy are taken. Both fractions are those of the training loss itself: tokens whose clipped side is taken, under GSPO
those of whole responses.
"""

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from mrl.algo.advantages import AdvantageInputs, response_advantages
from mrl.algo.aggregate import count, to_floats
from mrl.algo.losses import LossInputs, policy_loss
from mrl.algo.plain import PolicyLossParameters
from mrl.algo.rows import row_sums
from mrl.config.load import load_config
from mrl.data.batch import TrainBatch
from mrl.data.row_columns import positions
from mrl.data.samples import Sample, packed
from mrl.process.free_ports import free_port
from mrl.rank.packing import in_rows
from mrl.record.metrics import reduce_parts

sys.path.append(str(Path(__file__).resolve().parent))
from stamp import facts

SCRIPTS = Path(__file__).resolve().parents[1]
PRESET = SCRIPTS.parent / "parallel_configs" / "long-moe" / "cpu.yaml"
# the GSPO paper's own baseline
GRPO = PolicyLossParameters("vanilla", "seq-mean-token-mean", clip_ratio_low=0.2, clip_ratio_high=0.27)
GSPO = PolicyLossParameters("gspo", "seq-mean-token-mean", clip_ratio_low=3e-4, clip_ratio_high=4e-4)
SHORTEST = 256  # tokens; shorter responses are left out
BAND = (1e-3, 2e-2)  # of GRPO's fraction, where the two are compared
GOAL = 10.0  # times


@dataclass(frozen=True)
class Row:
    """After one update: clip fractions, and standard deviations of the log-ratios in nats."""

    lr: float
    update: int
    grpo: float
    gspo: float
    token_std: float
    sequence_std: float

    @property
    def times(self) -> float:
        """GSPO's fraction over GRPO's; infinite where GRPO clips nothing."""
        return self.gspo / self.grpo if self.grpo else float("inf")


def rollouts(world: Path, prompts: int, n: int, seed: int) -> TrainBatch:
    """Responses of at least SHORTEST tokens with their advantages; without log-probs.

    Makes the world where it is not there yet.
    """
    sys.path.insert(0, str(SCRIPTS))
    from counting_reward import compute_score
    from make_long_world import Counting, answer, build, prompt_ids, sample, split_starts
    from make_tiny_world import make
    from transformers import AutoTokenizer, Qwen3MoeForCausalLM

    print(f"world: {make(world, 0, False, Counting(), build)}", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    model = Qwen3MoeForCausalLM.from_pretrained(world / "model").eval()
    starts = [start for start in split_starts(seed)[0][:prompts] for _ in range(n)]
    drawn = sample(model, tokenizer, starts, torch.Generator().manual_seed(seed))
    long = [i for i, ids in enumerate(drawn) if len(ids) >= SHORTEST]
    scores = [compute_score("", tokenizer.decode(drawn[i], skip_special_tokens=True), answer(starts[i])) for i in long]
    samples = [
        Sample(
            starts[i],
            starts[i],
            i,
            0,
            tuple(prompt_ids(tokenizer, starts[i])),
            tuple(drawn[i]),
            (0.0,) * len(drawn[i]),
            "stop",
            0,
        )
        for i in long
    ]
    batch = TrainBatch.of(packed(samples), 1.0)
    inputs = AdvantageInputs(np.array(scores), np.array([starts[i] for i in long]), batch.response_lengths)
    advantages = response_advantages("grpo", inputs)
    return replace(batch, advantages=advantages.of_tokens(batch.response_lengths, batch.loss_mask, None))


def updates_at(world: Path, batch: TrainBatch, lr: float, updates: int) -> tuple[list[Row], np.ndarray]:
    """Rows of each update at one learning rate, and the log-ratios [response tokens] after the last;
    always the same start.
    """
    from mrl.rank.actor import MegatronActor

    rows_a_batch = -(-len(batch) // updates)
    settings = {
        "model.path": world / "model", "actor.optim.lr": lr, "actor.optim.lr_warmup_steps": 0, "rollout.n": 1,
        "actor.ppo_mini_batch_size": rows_a_batch, "data.train_batch_size": rows_a_batch * updates,
        "actor.layout": "{world_size: 1, tensor_model_parallel_size: 1, expert_model_parallel_size: 1, "
                        "sequence_parallel: false}",
    }  # fmt: skip
    actor = MegatronActor(
        load_config(PRESET, "grpo", [f"{k}={v}" for k, v in settings.items()]).config, 0, 1, "127.0.0.1", free_port()
    )
    order = np.random.default_rng(0).permutation(len(batch))  # an update sees responses to all prompts
    old = log_probs(actor, batch)
    batch, rows = replace(batch, old_log_probs=old), []
    for number, part in enumerate(np.array_split(order, updates), start=1):
        actor.update(batch.rows(part))
        new = log_probs(actor, batch)
        rows.append(measured(lr, number, batch, new))
    actor.close()
    return rows, new - old


def log_probs(actor, batch: TrainBatch) -> np.ndarray:
    """[response tokens] under the actor's weights."""
    result = actor.log_probs(batch)
    found = np.zeros_like(result.log_probs)
    found[positions(batch.response_lengths, result.rows)] = result.log_probs
    return found


def measured(lr: float, update: int, batch: TrainBatch, new: np.ndarray) -> Row:
    """Both fractions on the same log-ratios."""
    mask = np.arange(batch.response_lengths.max())[None] < batch.response_lengths[:, None]
    tensors = [torch.from_numpy(in_rows(x, mask)).double() for x in (new, batch.old_log_probs, batch.advantages)]
    inputs = LossInputs(*tensors, torch.from_numpy(mask))
    grpo, gspo = (
        reduce_parts([to_floats(policy_loss(parameters, inputs, count(inputs.response_mask)).metrics)])
        for parameters in (GRPO, GSPO)
    )
    log_ratio = new - batch.old_log_probs
    return Row(
        lr,
        update,
        grpo["actor/pg_clipfrac"],
        gspo["actor/pg_clipfrac"],
        float(log_ratio.std()),
        gspo["actor/log_seq_ratio_std"],
    )


def draw(rows: list[Row], log_ratio: np.ndarray, lengths: np.ndarray, chosen: Row, path: Path) -> None:
    """Left the two distributions with their bands, right the fractions of every row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), dpi=130, layout="constrained")
    sequences = row_sums(log_ratio, lengths) / lengths
    edges = np.logspace(-4, 0.5, 37)
    bins = np.concatenate([-edges[::-1], edges])
    for values, label in ((log_ratio, "tokens (GRPO's ratio)"), (sequences, "responses (GSPO's ratio)")):
        left.hist(values, bins=bins, weights=np.full(len(values), 1 / len(values)), alpha=0.6, label=label)
    for parameters, style in ((GRPO, "--"), (GSPO, ":")):
        for edge in (1 - parameters.clip_ratio_low, 1 + parameters.clip_ratio_high):
            left.axvline(np.log(edge), color="black", linestyle=style, linewidth=0.9)
    left.set_xscale("symlog", linthresh=edges[0])
    left.set_xticks([-1, -1e-1, -1e-2, -1e-3, 0, 1e-3, 1e-2, 1e-1, 1])
    left.set(xlabel="log ratio (nats)", ylabel="share")
    left.set_title(f"lr {chosen.lr:g}, after the last update; dashed: GRPO's band, dotted: GSPO's", fontsize=9)
    left.legend(fontsize=8)
    for name, marker in (("gspo", "o"), ("grpo", "s")):
        right.plot(
            [r.token_std for r in rows],
            [getattr(r, name) for r in rows],
            marker,
            label=f"{name.upper()}'s clipped fraction",
        )
    right.axhspan(*BAND, alpha=0.1, color="C1", label="where they are compared")
    right.set(xlabel="standard deviation of the token log ratio", ylabel="clipped fraction", xscale="log", yscale="log")
    right.grid(alpha=0.3)
    right.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def sweep(world: Path, batch: TrainBatch, lrs: list[float], updates: int) -> tuple[list[Row], Row, np.ndarray]:
    """Rows of all learning rates, printed as they come; of the first one whose last update is inside BAND that row and
    the log-ratios [response tokens]. Raises SystemExit where none is.
    """
    print(f"{'lr':>8} {'update':>6} {'GRPO':>10} {'GSPO':>10} {'times':>8} {'std token':>10} {'std seq':>10}")
    rows, best = [], None
    for lr in lrs:
        found, log_ratio = updates_at(world, batch, lr, updates)
        for r in found:
            print(
                f"{r.lr:8g} {r.update:6d} {r.grpo:10.5f} {r.gspo:10.5f} {r.times:8.1f} "
                f"{r.token_std:10.5f} {r.sequence_std:10.6f}",
                flush=True,
            )
        rows += found
        if best is None and BAND[0] <= found[-1].grpo <= BAND[1]:
            best = (found[-1], log_ratio)
    if best is None:
        raise SystemExit(
            f"no learning rate of {lrs} brings GRPO's clipped fraction to {BAND[0]:.1%} - {BAND[1]:.0%}; try others"
        )
    return rows, *best


def result(rows: list[Row], lengths: np.ndarray) -> dict:
    """What is stored; `lengths` of the responses, in tokens."""
    inside = [r for r in rows if BAND[0] <= r.grpo <= BAND[1]]
    return facts("scripts/evidence/clipping.sh") | {
        "responses": len(lengths),
        "shortest": int(lengths.min()),
        "mean_length": round(float(lengths.mean()), 1),
        "grpo_band": [0.2, 0.27],
        "gspo_band": [3e-4, 4e-4],
        "rows": [vars(r) | {"times": None if not r.grpo else round(r.times, 1)} for r in rows],
        "least_times_within_goal": round(min(r.times for r in inside), 1),
        "goal": f"GSPO's clipped fraction >= {GOAL:g} x GRPO's wherever GRPO's is {BAND[0]:.1%} to {BAND[1]:.0%}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=Path, default=Path("long-world"))
    parser.add_argument("--json", type=Path, default=Path("docs/results/clipping.json"))
    parser.add_argument("--plot", type=Path, default=Path("docs/results/clipping.png"))
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--lrs", type=float, nargs="+", default=[3e-5, 1e-4, 3e-4, 1e-3])
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch = rollouts(args.world, args.prompts, args.n, seed=0)
    lengths = batch.response_lengths
    print(f"{len(batch)} responses of {int(lengths.min())} to {int(lengths.max())} tokens")
    rows, chosen, log_ratio = sweep(args.world, batch, args.lrs, args.updates)
    draw(rows, log_ratio, lengths, chosen, args.plot)
    made = result(rows, lengths)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(made, indent=2) + "\n")
    print(json.dumps({k: v for k, v in made.items() if k != "rows"}))
    if made["least_times_within_goal"] < GOAL:
        raise SystemExit("the goal was missed")


if __name__ == "__main__":
    main()
