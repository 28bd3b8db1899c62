"""`mrl samples`."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mrl.cli.config_arguments import positive
from mrl.errors import ConfigError


def add(commands) -> None:
    """Registers the command."""
    samples = commands.add_parser("samples", help="read the responses that a run trained on, also while it is on")
    samples.add_argument("run_dir", metavar="RUN", help="run directory")
    samples.add_argument("--step", type=positive, metavar="N", help="of this step; default: the newest with a file")
    samples.add_argument("--prompt", type=int, metavar="ID", help="responses to this prompt alone")
    samples.add_argument("--worst", type=positive, metavar="K", help="the K with the lowest scores, lowest first")
    samples.add_argument(
        "--log-probs",
        action="store_true",
        help="each response token with generation's log-prob and how far the trainer's is from it "
        "(record.trainer_log_probs)",
    )
    samples.add_argument("--jsonl", action="store_true", help="one JSON object a response, token ids and all, no text")
    samples.set_defaults(run=_samples)


def _samples(options: argparse.Namespace) -> None:
    """Raises ConfigError where the run, the step or the prompt has none."""
    import numpy as np

    from mrl.record.run_dir import RunDir, json_line
    from mrl.record.sample_files import StepFile

    run = RunDir(Path(options.run_dir))
    step = _step(run.samples, options.step)
    try:
        file = StepFile(run.samples, step)
    except FileNotFoundError:
        steps = ", ".join(map(str, _steps(run.samples))) or "no step"
        raise ConfigError(f"--step {step}: {run.samples} has no file of it; it has {steps}") from None
    rows = np.arange(len(file.scores)) if options.worst is None else file.worst(len(file.scores))
    if options.prompt is not None:
        rows = rows[file.prompt_ids[rows] == options.prompt]
        if not len(rows):
            raise ConfigError(f"--prompt {options.prompt}: step {step} has no response to it")
    shown = file.read(rows[: options.worst])
    gaps = file.differences([row["sample_id"] for row in shown]) if options.log_probs else [None] * len(shown)
    if options.jsonl:
        own = ({} if gap is None else {"trainer_less_rollout": gap} for gap in gaps)
        sys.stdout.writelines(json_line(row | more) for row, more in zip(shown, own, strict=True))
        return
    decode = _decoder(run.config)
    for row, gap in zip(shown, gaps, strict=True):
        print(_text(step, row, decode))
        if options.log_probs:
            print(_table(row, gap, decode))


def _steps(folder: Path) -> list[int]:
    from mrl.record.sample_files import steps_with_responses

    return steps_with_responses(folder)


def _step(folder: Path, asked: int | None) -> int:
    if asked is not None:
        return asked
    if not (steps := _steps(folder)):
        raise ConfigError(f"{folder} has no files of samples: no run stands there, or record.samples is none")
    return steps[-1]


def _decoder(config: Path) -> Callable[[list[int]], str]:
    """Of the run's token ids: by tokenizer.json alone, which takes no second, where the model has one.

    Raises ConfigError where its model's folder is not here.
    """
    import yaml

    from mrl.data.dataset import load_tokenizer
    from mrl.extras.report.samples import decoder
    from mrl.model.hub import local_folder

    path = yaml.safe_load(config.read_text(encoding="utf-8"))["model"]["path"] if config.exists() else ""
    try:
        folder = local_folder(path)
        return decoder([Path(folder)]) or load_tokenizer(folder).decode
    except ConfigError as error:
        raise ConfigError(f"{config}: {error}; --jsonl needs no tokenizer") from None


def _text(step: int, row: dict[str, Any], decode: Callable[[list[int]], str]) -> str:
    reward = {name: value for name, value in row["reward"].items() if name not in ("score", "reason")}
    head = (
        f"step {step}  prompt {row['prompt_id']}  sample {row['sample_id']}  score {row['reward']['score']:g}"
        f"  {row['reward'].get('reason', '')}  {len(row['response_ids'])} tokens, {row['stop_reason']}"
        f"  weights of step {row['weight_version']}"
    )
    return "\n".join(
        [
            f"=== {head}",
            *([f"--- reward  {json.dumps(reward, ensure_ascii=False)}"] if reward else []),
            "--- prompt",
            decode(row["prompt_ids"]),
            "--- response",
            decode(row["response_ids"]),
        ]
    )


def _table(row: dict[str, Any], gap: list[float] | None, decode: Callable[[list[int]], str]) -> str:
    """A line a token; the third column is the trainer's log-prob less generation's."""
    missing = [] if gap is not None else ["(the trainer's are not kept: record.trainer_log_probs)"]
    columns = zip(row["response_ids"], row["rollout_log_probs"], gap or [None] * len(row["response_ids"]), strict=True)
    lines = [
        f"{i:6}  {log_prob:10.4f}  {'' if other is None else format(other, '+.1e'):>9}  {decode([token])!r}"
        for i, (token, log_prob, other) in enumerate(columns)
    ]
    return "\n".join(["--- log-probs", *missing, *lines])
