"""Makes a tiny world to run the whole trainer on: a Qwen3-MoE checkpoint of about a million weights, its tokenizer, and
a verifiable task.

    python scripts/make_tiny_world.py --out tiny-world --seed 0

The task is addition of two numbers, digit by digit in characters. The model is warm-started by supervised training
until a fair share of its sampled answers is right, so that reinforcement learning has something to reinforce and much
left to gain. Held-out problems are never trained on, neither here nor later. The same seed gives the same files on the
same machine. One JSON line at the end says what was made.
"""

import argparse
import functools
import json
import os
import random
import shutil
import string
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

DATA_SOURCE = "tiny/addition"
NUMBERS = 50  # both terms are below this
HELD_OUT = 256  # problems
MAX_ANSWER = 4  # tokens: two digits, the end, and one to spare
SPECIAL = ("<pad>", "<eos>", "<unk>", "<system>", "<user>", "<assistant>")
VOCAB_SIZE = 128
POSITIONS = 128  # tokens, prompt and response
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
MARKER = "world.json"  # written last: a folder that has it is complete


@dataclass(frozen=True)
class WarmUp:
    """Supervised training with strong label smoothing.

    The smoothing bounds the probability of a right token near 1 - label_smoothing, hence of a right answer of three
    tokens near its cube:
    the warm start has seen how addition goes and is still unsure of every digit, so that sampling explores and there is
    much to gain.
    """

    steps: int = 200
    batch: int = 128  # problems per optimizer step
    lr: float = 2e-3
    label_smoothing: float = 0.4
    lowest: float = 0.10  # sampled exact match on the held-out problems that is accepted at the end
    highest: float = 0.40


@dataclass(frozen=True)
class Problem:
    """`left + right`."""

    left: int
    right: int

    @property
    def question(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        return str(self.left + self.right)


def make_tokenizer(
    positions: int = POSITIONS, more: Sequence[str] = (), template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """One token a character over printable ASCII, role markers, `more` special tokens,
    and reserved words that fill the vocabulary to its padded size.
    """
    words = [*SPECIAL, *more, *string.printable[:95], "\n"]
    words += [f"<reserved_{i}>" for i in range(VOCAB_SIZE - len(words))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<system>", "<user>", "<assistant>", *more],
        clean_up_tokenization_spaces=False,
        model_max_length=positions,
    )
    tokenizer.chat_template = template
    return tokenizer


def make_model(
    seed: int, positions: int = POSITIONS, hidden: int = 128, layers: int = 4, experts: int = 8
) -> Qwen3MoeForCausalLM:
    """A float32 Qwen3-MoE whose every size divides by 32, so that it can be cut by any small layout."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        moe_intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=positions,
        # about 1/sqrt(hidden_size) / 1.5: learns several times faster at this width than the usual 0.02
        initializer_range=0.06 * (128 / hidden) ** 0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<eos>"),
        pad_token_id=SPECIAL.index("<pad>"),
        dtype=torch.float32,
    )
    return Qwen3MoeForCausalLM(config)


def split_problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """(training, held-out), disjoint, in an order that depends on the seed alone."""
    problems = [Problem(left, right) for left in range(NUMBERS) for right in range(NUMBERS)]
    random.Random(seed).shuffle(problems)
    return problems[HELD_OUT:], problems[:HELD_OUT]


class Task:
    """Problems as token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.pad, self.eos = tokenizer.pad_token_id, tokenizer.eos_token_id
        self.prompt_ids = functools.cache(self._prompt_ids)
        self.answer_ids = functools.cache(self._answer_ids)

    def _prompt_ids(self, problem: Problem) -> list[int]:
        messages = [{"role": "user", "content": problem.question}]
        return self.tokenizer(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))[
            "input_ids"
        ]

    def _answer_ids(self, problem: Problem) -> list[int]:
        return [*self.tokenizer(problem.answer)["input_ids"], self.eos]

    def supervised(self, problems: list[Problem]) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids [batch, length], labels [batch, length] with -100 outside the answers)."""
        pairs = [(self.prompt_ids(p), self.answer_ids(p)) for p in problems]
        length = max(len(prompt) + len(answer) for prompt, answer in pairs)
        ids = torch.full((len(pairs), length), self.pad)
        labels = torch.full_like(ids, -100)
        for row, (prompt, answer) in enumerate(pairs):
            end = len(prompt) + len(answer)
            ids[row, :end] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : end] = torch.tensor(answer)
        return ids, labels


@torch.no_grad()
def sample_answers(
    model: Qwen3MoeForCausalLM, task: Task, problems: list[Problem], generator: torch.Generator
) -> list[str]:
    """One answer to each problem, sampled at temperature 1;
    an answer that does not end in time is given as it stands with a mark.
    """
    prompts = [task.prompt_ids(p) for p in problems]
    width = max(map(len, prompts))
    step = torch.tensor([[task.pad] * (width - len(p)) + p for p in prompts])  # left-padded
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    cache, tokens = None, []
    for _ in range(MAX_ANSWER):
        position = (mask.cumsum(1) - 1).clamp(min=0)[:, -step.shape[1] :]
        out = model(step, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        step = torch.multinomial(out.logits[:, -1].softmax(-1), 1, generator=generator)
        mask = torch.cat([mask, torch.ones_like(step)], 1)
        tokens.append(step)
    return [_until_eos(row, task) for row in torch.cat(tokens, 1).tolist()]


def _until_eos(row: list[int], task: Task) -> str:
    ended = row[: row.index(task.eos)] if task.eos in row else [*row, task.eos]
    return task.tokenizer.decode(ended)


def exact_match(model: Qwen3MoeForCausalLM, task: Task, problems: list[Problem], seed: int, rounds: int = 1) -> float:
    """Share of right answers sampled at temperature 1, `rounds` answers a problem."""
    generator = torch.Generator().manual_seed(seed)
    answers = sample_answers(model, task, problems * rounds, generator)
    return sum(a == p.answer for a, p in zip(answers, problems * rounds, strict=True)) / len(answers)


def warm_up(model: Qwen3MoeForCausalLM, task: Task, problems: list[Problem], plan: WarmUp, seed: int) -> None:
    """Trains `model` in place on the cross entropy of the answers."""
    picker, optimizer = random.Random(seed), torch.optim.AdamW(model.parameters(), lr=plan.lr)
    for step in range(1, plan.steps + 1):
        ids, labels = task.supervised(picker.sample(problems, plan.batch))
        logits = model(ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=plan.label_smoothing
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"warm-up step {step} of {plan.steps}: loss {loss.item():.3f}", file=sys.stderr, flush=True)


def data_row(source: str, content: str, ability: str, truth: str, **extra: Any) -> dict[str, Any]:
    """A row in verl's schema."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": content}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": extra,
    }


def data_rows(problems: list[Problem], split: str) -> list[dict[str, Any]]:
    """Rows of the problems."""
    return [data_row(DATA_SOURCE, p.question, "math", p.answer, index=i, split=split) for i, p in enumerate(problems)]


def write_data(out: Path, rows: Mapping[str, list[dict[str, Any]]]) -> None:
    """Writes data/NAME.parquet for each name."""
    (out / "data").mkdir(parents=True)
    for name, of_file in rows.items():
        pq.write_table(pa.Table.from_pylist(of_file), out / "data" / f"{name}.parquet")


def save_model(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """A checkpoint whose config.json uses the keys of published ones, which every reader knows."""
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    config |= {"num_experts": config.pop("num_local_experts"), "torch_dtype": config.pop("dtype")}
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def build(out: Path, seed: int, plan: WarmUp) -> dict[str, Any]:
    """Writes the whole world into the empty folder `out` and returns what the JSON line says of it."""
    train, held_out = split_problems(seed)
    tokenizer, model = make_tokenizer(), make_model(seed)
    task = Task(tokenizer)
    warm_up(model, task, train, plan, seed)
    match = exact_match(model, task, held_out, seed + 1, rounds=4)
    if not plan.lowest <= match <= plan.highest:
        wanted = f"{plan.lowest} to {plan.highest}"
        raise SystemExit(
            f"the warm start answers {match:.3f} of the held-out problems and not {wanted}; try another --seed"
        )
    save_model(model, tokenizer, out / "model")
    write_data(out, {"train": data_rows(train, "train"), "val": data_rows(held_out, "val")})
    return {"sampled_exact_match": round(match, 4)} | counts(model, train, held_out)


def counts(model: PreTrainedModel, train: Sequence[Any], held_out: Sequence[Any]) -> dict[str, Any]:
    """What the JSON line says of every world."""
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_prompts": len(train),
        "val_prompts": len(held_out),
    }


def existing(out: Path, seed: int, force: bool) -> dict[str, Any] | None:
    """What stands at `out`: None when it may be (re)built;
    exits where that would delete what this script did not make.
    """
    if not out.exists():
        return None
    if not (out / MARKER).is_file():
        raise SystemExit(f"{out} exists and is no tiny world (it has no {MARKER}); remove it or choose another --out")
    world = json.loads((out / MARKER).read_text())
    if force:
        return None
    if world["seed"] != seed:
        raise SystemExit(
            f"{out} was made with --seed {world['seed']}, not {seed}; pass --force to rebuild "
            "it or choose another --out"
        )
    return world


def make(
    out: Path,
    seed: int,
    force: bool,
    plan: Any,
    build: Callable[[Path, int, Any], dict[str, Any]] = build,
    options: Callable[[Path], Mapping[str, Any]] = lambda out: {},
) -> dict[str, Any]:
    """Builds next to `out` and renames, so that a folder at `out` is always whole. `plan` is what `build` takes.

    `options`: what a run in the world at `out` sets, which is written into its file `options`.
    """
    world = existing(out, seed, force)
    if world is not None:
        return world
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        work.mkdir()
        start = time.monotonic()
        world = {"seed": seed} | build(work, seed, plan) | {"warm_up": asdict(plan)}
        world["seconds"] = round(time.monotonic() - start, 1)
        if settings := options(out):
            (work / "options").write_text("".join(f"--set {name}={value}\n" for name, value in settings.items()))
        (work / MARKER).write_text(json.dumps(world) + "\n")
        if out.exists():
            shutil.rmtree(out)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return world


def main(
    description: str,
    out: str,
    plan: Any,
    build: Callable[[Path, int, Any], dict[str, Any]],
    options: Callable[[Path], Mapping[str, Any]] = lambda out: {},
) -> None:
    """The command of a script that makes a world, by default at `out`."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--force", action="store_true", help="rebuild a world that stands at --out")
    args = parser.parse_args()
    torch.set_num_threads(2)  # whatever the environment says: sums depend on it
    print(json.dumps({"out": str(args.out), **make(args.out, args.seed, args.force, plan, build, options)}))


if __name__ == "__main__":
    main(__doc__, "tiny-world", WarmUp(), build)
