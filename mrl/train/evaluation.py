"""`mrl eval`: engines alone, on a Hugging Face checkpoint or a saved step,
over the held-out sets of a configuration.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mrl.checkpoint.convert import write_hf
from mrl.checkpoint.manifest import HF_FOLDER
from mrl.checkpoint.open_checkpoint import open_saved
from mrl.cluster.prerequisites import check_object_stores
from mrl.cluster.process_logs import with_log_tails
from mrl.cluster.ray_cluster import object_store_sizes, ray_cluster
from mrl.cluster.rollout_group import RolloutGroup
from mrl.cluster.scoring import start_scorers
from mrl.config.load import ResolvedConfig
from mrl.config.schema import RunConfig
from mrl.data.dataset import PromptDataset, load_tokenizer
from mrl.errors import ConfigError
from mrl.plan.step_batch import held_out_bytes
from mrl.record.console import PlainConsole
from mrl.record.run_dir import json_line, write_text
from mrl.reward.pool import check_function
from mrl.train.rollouts import Responder
from mrl.train.run import StopFlag, load_validation, reward_spec, stop_on_signals
from mrl.train.validation import Validation, answer_and_score

RESULTS, GENERATIONS, CONFIG, MODEL = "results.json", "generations.jsonl", "config.resolved.yaml", "model.tmp"


def evaluate(resolved: ResolvedConfig, checkpoint: Path | None, output: Path, console: PlainConsole) -> dict[str, Any]:
    """Answers and scores every held-out prompt; writes results, generations and configuration into `output`; returns
    the results.

    `checkpoint`: a `step-N` folder, None for the configuration's model.path. It is brought into Hugging Face's form
    within `output` once prompts and reward are known to be good, and removed at the end. Raises one of mrl.errors; an
    output that holds results already is refused.
    """
    if (output / RESULTS).exists():
        raise ConfigError(f"--output: {output} holds results already; give another folder")
    began = time.monotonic()
    with _folder(output), ExitStack() as stack:
        config = resolved.config
        tokenizer = load_tokenizer(config.model.path if checkpoint is None else str(checkpoint / HF_FOLDER))
        prompts = load_validation(config, tokenizer)
        scoring = reward_spec(config, prompts.data_sources)
        check_function(scoring)
        if checkpoint is not None:
            config = _with_checkpoint(config, checkpoint, output)
        stack.enter_context(ray_cluster(config, actor=False))
        stores = object_store_sizes(config)
        nodes = min(len(stores), config.rollout.num_engines * config.rollout.data_parallel_size) or 1
        check_object_stores(-(-held_out_bytes(config, len(prompts)) // nodes), stores)
        stop = stack.enter_context(stop_on_signals(StopFlag()))
        stack.enter_context(with_log_tails(output / "logs"))
        engines = RolloutGroup(config, output, stop.raise_if_set)
        stack.callback(engines.stop)
        engines.wait_started()
        rewards = stack.enter_context(start_scorers(config, scoring, output / "logs", engines.nodes))
        responder = Responder(engines, rewards, config.reward, console, stop.raise_if_set)
        validation = answer_and_score(config, responder, prompts)
        results = _results(resolved.config, checkpoint, prompts, validation, time.monotonic() - began)
        validation.write(responder, output / GENERATIONS)
        write_text(output / CONFIG, resolved.to_yaml())
        write_text(output / RESULTS, json_line(results))
    return results


@contextmanager
def _folder(output: Path) -> Iterator[None]:
    """The folder to write into; a converted checkpoint in it goes at the end in any case."""
    try:
        (output / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output: cannot write {output} ({error.strerror}); give another folder") from error
    try:
        yield
    finally:
        shutil.rmtree(output / MODEL, ignore_errors=True)


def _with_checkpoint(config: RunConfig, checkpoint: Path, output: Path) -> RunConfig:
    shutil.rmtree(output / MODEL, ignore_errors=True)  # of an evaluation that was killed
    write_hf(open_saved(checkpoint), output / MODEL)
    return config.model_copy(
        update={"model": config.model.model_copy(update={"path": str((output / MODEL).resolve())})}
    )


def _results(
    config: RunConfig, checkpoint: Path | None, prompts: PromptDataset, validation: Validation, seconds: float
) -> dict[str, Any]:
    sources = validation.sources
    return {
        "model": config.model.path,
        "checkpoint": checkpoint and str(checkpoint),
        "sampling": config.rollout.val_kwargs.model_dump(),
        "prompts": len(prompts),
        "responses": {source: sources.count(source) for source in sorted(set(sources))},
        "metrics": validation.metrics,
        "seconds": seconds,
    }


def table(results: dict[str, Any]) -> str:
    """One line a set and core metric, with its 95 % interval over prompts where there is one."""
    metrics = results["metrics"]
    lines = []
    for name, value in metrics.items():
        section, _, rest = name.partition("/")
        if section == "val-core" and not name.endswith("/std"):
            low, high = (metrics.get(f"val-aux/{rest}/ci95_{end}") for end in ("low", "high"))
            lines.append(f"{rest:56} {value:8.4f}" + (f"   95 %: {low:.4f} to {high:.4f}" if low is not None else ""))
    head = f"{results['prompts']} prompts, {sum(results['responses'].values())} responses, {results['seconds']:.0f} s"
    return "\n".join([head, *lines])
