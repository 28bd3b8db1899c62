"""Implements `mrl samples`."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from mrl.cli.config_arguments import positive
from mrl.errors import ConfigError


def add(commands) -> None:
    """Registers the command."""
    samples = commands.add_parser("samples", help="read the responses that a run trained on, also while it goes on")
    samples.add_argument("run_dir", metavar="RUN", help="run directory")
    samples.add_argument("--step", type=positive, metavar="N", help="step to read; default: the newest with a file")
    samples.add_argument("--prompt", type=int, metavar="ID", help="only responses to this prompt")
    samples.add_argument(
        "--id",
        type=int,
        metavar="ID",
        help="one response through everything: log-probs of engine and trainer, its group, advantage and reward, and "
        "the same prompt in other steps",
    )
    samples.add_argument("--worst", type=positive, metavar="K", help="the K with the lowest scores, lowest first")
    samples.add_argument(
        "--log-probs",
        action="store_true",
        help="show each response token with the engine's log-prob and the trainer's difference from it "
        "(record.trainer_log_probs)",
    )
    samples.add_argument(
        "--turns",
        action="store_true",
        help="show each turn: what was sampled, called and read (rollout.turns)",
    )
    samples.add_argument(
        "--jsonl", action="store_true", help="print one JSON object a response, with token ids, no text"
    )
    samples.set_defaults(run=_samples)


def _samples(options: argparse.Namespace) -> None:
    """Prints the samples. Raises ConfigError where the run, the step or the prompt has none."""
    from mrl.record.run_dir import RunDir
    from mrl.record.sample_files import StepFile, readable

    run = RunDir(Path(options.run_dir))
    step = _step(run.samples, options.step)
    try:
        with readable(run.samples, step):
            _show(options, run, step, StepFile(run.samples, step))
    except FileNotFoundError:
        steps = ", ".join(map(str, _steps(run.samples))) or "no step"
        raise ConfigError(f"--step {step}: {run.samples} has no file of it; it has {steps}") from None


def _show(options: argparse.Namespace, run: Any, step: int, file: Any) -> None:
    import numpy as np

    from mrl.record.run_dir import json_line

    rows = np.arange(len(file.scores)) if options.worst is None else file.worst(len(file.scores))
    if options.prompt is not None:
        rows = rows[file.prompt_ids[rows] == options.prompt]
        if not len(rows):
            raise ConfigError(f"--prompt {options.prompt}: step {step} has no response to it")
    if options.id is not None:
        _one_through_all(run, step, file, options)
        return
    shown = file.read(rows[: options.worst])
    gaps = file.differences([row["sample_id"] for row in shown]) if options.log_probs else [None] * len(shown)
    if options.jsonl:
        own = ({} if gap is None else {"trainer_less_rollout": gap} for gap in gaps)
        sys.stdout.writelines(json_line(row | more) for row, more in zip(shown, own, strict=True))
        return
    decode = _decoder(run.config, sorted(run.checkpoints.glob("step-*/hf"), reverse=True))
    for row, gap in zip(shown, gaps, strict=True):
        print(_text(step, row, decode, options.turns))
        if options.log_probs:
            print(_table(row, gap, decode))


def _one_through_all(run: Any, step: int, file: Any, options: argparse.Namespace) -> None:
    """Prints everything that is kept of one response."""
    from mrl.record.run_dir import json_line
    from mrl.tools.one_sample import story_of

    story = story_of(run, file, options.id)
    if options.jsonl:
        sys.stdout.write(json_line(story))
        return
    decode = _decoder(run.config, sorted(run.checkpoints.glob("step-*/hf"), reverse=True))
    print(_text(step, story, decode, options.turns))
    print(_table(story, story["trainer_less_rollout"], decode))
    ratio = "" if story["ratio"] is None else f"; trainer over engine, whole response: {story['ratio']:.4g}"
    print(f"--- weights of step {story['weight_version']}{_by(story)}{ratio}")
    scores = ", ".join(f"{each['sample_id']}: {each['score']:g}" for each in story["group"])
    advantage = "not known from scores alone" if story["advantage"] is None else f"{story['advantage']:.4g}"
    print(f"--- its group, score by id: {scores}\n--- advantage: {advantage}")
    if (routes := story["routes"]) is not None:
        others = ", ".join(f"{number}: {count}" for number, count in routes["elsewhere"].items()) or "none"
        print(
            f"--- routes: {routes['pairs'] - routes['missing']} of {routes['pairs']} pairs of token and layer known; "
            f"prompt pairs with other experts, by response of the same weights: {others}"
        )
    if story["dropped"]:
        print(f"--- dropped: {story['dropped']}")
    for other, found in story["other_steps"].items():
        print(f"--- the same prompt in step {other}: scores {', '.join(f'{score:g}' for score in found)}")


def _steps(folder: Path) -> list[int]:
    from mrl.record.sample_files import steps_with_responses

    return steps_with_responses(folder)


def _step(folder: Path, asked: int | None) -> int:
    if asked is not None:
        return asked
    if not (steps := _steps(folder)):
        raise ConfigError(f"{folder} has no files of samples: there is no run, or record.samples is none")
    return steps[-1]


def _decoder(config: Path, stored: Sequence[Path] = ()) -> Callable[[list[int]], str]:
    """Builds the decoder of the run's token ids. `stored` are folders of its checkpoints that may have a tokenizer.

    A relative model.path is one of the folder that the run was started in, so it may not be here. Where there is a
    tokenizer.json, only that file is read, which takes less than a second. Raises ConfigError where there is none.
    """
    from mrl.data.dataset import load_tokenizer
    from mrl.model.hub import local_folder
    from mrl.tools.report.samples import decoder

    if not config.is_file():
        if decode := decoder(stored):
            return decode
        raise ConfigError(f"{config} is missing, which names the model whose tokenizer is needed; --jsonl needs none")
    path = _model_path(config)
    if decode := decoder([Path(path), *([] if Path(path).is_dir() else stored)]):
        return decode
    try:
        folder = local_folder(path)
        return decoder([Path(folder)]) or load_tokenizer(folder).decode
    except ConfigError as error:
        where = "" if Path(path).is_absolute() else f" (seen from {Path.cwd()}; no checkpoint of the run has one)"
        raise ConfigError(f"{config}: {error}{where}; --jsonl needs no tokenizer") from None


def _model_path(config: Path) -> str:
    from mrl.config.yaml_tree import parse_yaml
    from mrl.plain_files import CONFIG_BYTES, read_text, reason

    try:
        node, steps = parse_yaml(read_text(config, CONFIG_BYTES), str(config)).find(("model", "path"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{config}: cannot be read: {reason(error)}") from None
    if steps < 2 or not isinstance(node.value, str):
        raise ConfigError(f"{config}: names no model.path; --jsonl needs no tokenizer")
    return node.value


def _by(row: dict[str, Any]) -> str:
    return "" if row.get("engine") is None else f", engine {row['engine']}"


def _text(step: int, row: dict[str, Any], decode: Callable[[list[int]], str], by_turn: bool) -> str:
    from mrl.tools.report.samples import images_of, text_with_images

    images = images_of(row)
    reward = {name: value for name, value in row["reward"].items() if name not in ("score", "reason")}

    def shown(part: Sequence[int]) -> str:
        """Decodes response tokens at consecutive places."""
        ids = [row["response_ids"][place] for place in part]
        return text_with_images(ids, images, decode, len(row["prompt_ids"]) + (part[0] if part else 0))

    head = (
        f"step {step}  prompt {row['prompt_id']}  sample {row['sample_id']}  score {row['reward']['score']:g}"
        f"  {row['reward'].get('reason', '')}  {len(row['response_ids'])} tokens, {row['stop_reason']}"
        f"  weights of step {row['weight_version']}{_by(row)}"
    )
    return "\n".join(
        [
            f"=== {head}",
            *([f"--- reward  {json.dumps(reward, ensure_ascii=False)}"] if reward else []),
            "--- prompt",
            text_with_images(row["prompt_ids"], images, decode),
            *(f"--- image {number}  images/{image.name[:2]}/{image.name}" for number, image in enumerate(images, 1)),
            *(_turns(row, shown) if by_turn else ["--- response", shown(range(len(row["response_ids"])))]),
        ]
    )


def _turns(row: dict[str, Any], shown: Callable[[Sequence[int]], str]) -> list[str]:
    """Returns the lines of each turn: what was sampled, its calls, the context that they brought, and new branches.

    `shown` decodes response tokens by their places.

    A branch's own tokens do not count as that context. A response without turns counts as one turn.
    """
    turns = row.get("turns") or [{"first_token": 0, "stop_reason": row["stop_reason"], "calls": 0, "seconds": 0.0}]
    ids = row["response_ids"]
    sampled = row.get("sampled") or [True] * len(ids)
    calls = iter(row.get("calls") or [])
    begins = [branch["first_token"] for branch in row.get("branches") or []][1:]
    ends = [turn["first_token"] for turn in turns[1:]] + [len(ids)]
    lines = []
    for number, (turn, end) in enumerate(zip(turns, ends, strict=True), start=1):
        own = range(turn["first_token"], end)
        reward = ""
        if turn.get("reward"):
            reward = f", reward {turn['reward']:g}"
        lines += [f"--- turn {number}: {turn['stop_reason']}{reward}", shown([i for i in own if sampled[i]])]
        lines += [_call(call) for call in islice(calls, turn["calls"])]
        branch = next((begin for begin in begins if begin in own), end)
        context = [i for i in own if not sampled[i] and i < branch]
        lines += [f"--- context of turn {number}, after {turn['seconds']:.2f} s", shown(context)] if context else []
        if branch < end:
            lines += [f"--- branch {begins.index(branch) + 2} begins with", shown(range(branch, end))]
    return lines


def _call(call: dict[str, Any]) -> str:
    return f"--- call: {call['name'] or '(of no tool)'}, {call['reason']}, {call['seconds']:.2f} s"


def _table(row: dict[str, Any], gap: list[float] | None, decode: Callable[[list[int]], str]) -> str:
    """Formats one line a token. The third column is the trainer's log-prob less generation's."""
    missing = []
    if gap is None:
        missing = ["(the trainer's are not kept: record.trainer_log_probs)"]
    tokens = len(row["response_ids"])
    sampled = row.get("sampled") or [True] * tokens
    columns = zip(row["response_ids"], sampled, row["rollout_log_probs"], gap or [None] * tokens, strict=True)
    lines = [f"{i:6}  {_numbers(*numbers)}  {decode([token])!r}" for i, (token, *numbers) in enumerate(columns)]
    return "\n".join(["--- log-probs", *missing, *lines])


def _numbers(sampled: bool, log_prob: float, gap: float | None) -> str:
    if not sampled:
        return f"{'context':>10}  {'':>9}"
    return f"{log_prob:10.4f}  {'' if gap is None else format(gap, '+.1e'):>9}"
