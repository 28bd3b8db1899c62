"""Runs `mrl eval`: engines alone, on a Hugging Face checkpoint or a saved step, over configured validation sets."""

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mrl.checkpoint.convert import write_hf
from mrl.checkpoint.manifest import HF_FOLDER
from mrl.checkpoint.open_checkpoint import Checkpoint, open_hf, open_saved
from mrl.checkpoint.vision_tower import open_whole
from mrl.cluster.prerequisites import check_object_stores
from mrl.cluster.process_logs import with_log_tails
from mrl.cluster.ray_cluster import object_store_sizes, ray_cluster
from mrl.cluster.rollout_group import EngineOrder, RolloutGroup
from mrl.cluster.scoring import ScorerOrder, start_scorers
from mrl.cluster.seats import engine_seats
from mrl.config.deployment import Deployment
from mrl.config.load import ResolvedConfig
from mrl.config.schema import RunConfig, ValSamplingConfig, with_values
from mrl.data.dataset import PromptDataset
from mrl.driver.assemble_data import (
    checked_tools,
    image_reader,
    keep_images,
    load_validation,
    prompt_tokenizer,
    reward_spec,
    rule_in,
)
from mrl.driver.assemble_files import leave_nothing
from mrl.driver.stop_signals import StopFlag, grace_of_the_job, stop_on_signals
from mrl.driver.validation import Validation, ValidationSettings, answer_and_score
from mrl.errors import ConfigError
from mrl.generate.rollouts import Responder
from mrl.model import load_model_spec
from mrl.plan.sample_bytes import validation_bytes
from mrl.record.console import PlainConsole
from mrl.record.run_dir import RunDir, json_line, write_text
from mrl.reward.pool import check_function

RESULTS = "results.json"
GENERATIONS = "generations.jsonl"
WORK = "evaluation.tmp"  # folder within the output for what is removed at the end
MODEL = "model"  # within it
WHOLE = "whole"  # a trained vision tower and its text model
IMAGES = "images"


def evaluate(resolved: ResolvedConfig, checkpoint: Path | None, output: Path, console: PlainConsole) -> dict[str, Any]:
    """Answers and scores every held-out prompt. Writes results, generations and configuration into `output`.

    Returns the results. Engines answer from the weights as they are stored, whatever rollout.quantization says.
    `checkpoint`: a `step-N` folder, or None for the configuration's model.path. It, or an FP8 model.path, is converted
    to Hugging Face's form within `output`, after prompts and reward have been checked. The conversion, and the prompts'
    images, are removed at the end. Raises an error of mrl.errors, and refuses an output that holds results or a run.
    """
    output = output.resolve()
    _refuse_output(output)
    began = time.monotonic()
    with _work_folder(output) as work, ExitStack() as stack:
        config = _as_stored(resolved.config, checkpoint)
        source = config.model.path if checkpoint is None else str(checkpoint / HF_FOLDER)
        tokenizer = prompt_tokenizer(source, config.data)
        rollout = config.rollout
        tools = checked_tools(rollout.turns, config.data, config.reward, source, tokenizer, rollout.agent)
        images = None
        if config.model.vision is not None:
            images = image_reader(config.model.path, config.data)
        prompts = load_validation(config.data, tokenizer, tools, rule_in(config.reward), images)
        scoring = reward_spec(config.reward, prompts.data_sources)
        check_function(scoring)
        if stored := _stored_otherwise(config.model.path, checkpoint):
            if stored.model.trained_tower is not None:  # engines read the tower of model.path
                write_hf(stored, work / WHOLE, whole=open_whole(Path(config.model.path), stored))
                config = with_values(config, {"model.path": str(work / WHOLE)})
                stored = open_hf(work / WHOLE)
            write_hf(stored, work / MODEL)
            if images is None:
                model = config.model.model_copy(update={"path": str(work / MODEL)})
                config = config.model_copy(update={"model": model})
        deployment = Deployment.of(config)
        stack.enter_context(ray_cluster(deployment, actor=False))
        stores = object_store_sizes(deployment)
        nodes = min(len(stores), config.rollout.num_engines * config.rollout.data_parallel_size) or 1
        check_object_stores(-(-validation_bytes(config, len(prompts)) // nodes), stores)
        stop = StopFlag(grace_of_the_job())
        logs = output / "logs"
        stop.leave_nothing = partial(leave_nothing, logs)
        stack.enter_context(stop_on_signals(stop))
        stack.enter_context(with_log_tails(logs))
        order = EngineOrder.of(config, load_model_spec(config.model.path), logs)
        if images is not None:
            validation_data = config.data.model_copy(update={"train_files": []})
            keep_images(images, [prompts], validation_data, work / IMAGES)
            order = order.reading_from(work / MODEL, work / IMAGES)
        scorers = ScorerOrder(config.reward, scoring, config.model.path, logs)
        responder = _responder(stack, order, scorers, console, stop)
        settings = ValidationSettings.of(config.rollout, config.data, config.model.path, config.trainer.seed)
        validation = answer_and_score(settings, responder, prompts)
        results = {"model": resolved.config.model.path, "checkpoint": checkpoint and str(checkpoint)}
        results |= _results(config.rollout.val_kwargs, prompts, validation, time.monotonic() - began)
        validation.write(responder, output / GENERATIONS)
        write_text(RunDir(output).config, resolved.to_record())
        write_text(output / RESULTS, json_line(results))
    return results


def _responder(
    stack: ExitStack, order: EngineOrder, scorers: ScorerOrder, console: PlainConsole, stop: StopFlag
) -> Responder:
    """Starts engines and scorers, which `stack` ends."""
    engines = RolloutGroup(order, engine_seats(order.deployment), stop.raise_if_set)
    stack.callback(engines.stop)
    engines.start()
    engines.wait_started()
    rewards = stack.enter_context(start_scorers(scorers, engines.nodes))
    return Responder(engines, rewards, scorers.reward, console, stop.raise_if_set)


def _as_stored(config: RunConfig, checkpoint: Path | None) -> RunConfig:
    """Returns the configuration with engines that read the stored weights, and says what is left aside for it."""
    if checkpoint is None and config.actor.lora.path is not None:
        print("note: actor.lora.path is left aside: without --checkpoint an evaluation answers from model.path alone")
    if config.rollout.quantization is None:
        return config
    print("note: rollout.quantization is left aside: an evaluation answers from the weights as they are stored")
    return with_values(config, {"rollout.quantization": None})


def _refuse_output(output: Path) -> None:
    """Raises ConfigError for a folder with something to lose: an evaluation's results, or a run."""
    if (output / RESULTS).exists():
        raise ConfigError(f"--output: {output} holds results already; give another folder")
    run = RunDir(output)
    if found := next((path.name for path in (run.config, run.checkpoints, run.metrics) if path.exists()), None):
        raise ConfigError(f"--output: {output} is a run directory (it has {found}); give another folder")


@contextmanager
def _work_folder(output: Path) -> Iterator[Path]:
    """Provides an empty folder within `output`, which is removed at the end in any case. Nothing else is removed."""
    work = output / WORK
    shutil.rmtree(work, ignore_errors=True)  # left by an evaluation that was killed
    try:
        (output / "logs").mkdir(parents=True, exist_ok=True)
        work.mkdir()
    except OSError as error:
        raise ConfigError(f"--output: cannot write {output} ({error.strerror}); give another folder") from error
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _stored_otherwise(model_path: str, checkpoint: Path | None) -> Checkpoint | None:
    """Returns the checkpoint to evaluate if engines cannot load it directly; None if they can."""
    if checkpoint is not None:
        base = Path(model_path)  # for a checkpoint that has only adapters; compared by its digest
        return open_saved(checkpoint, base if base.is_dir() else None)
    if load_model_spec(model_path).loads_by_sync:
        return open_hf(Path(model_path))
    return None


def _results(
    sampling: ValSamplingConfig, prompts: PromptDataset, validation: Validation, seconds: float
) -> dict[str, Any]:
    sources = validation.sources
    return {
        "sampling": sampling.model_dump(),
        "prompts": len(prompts),
        "responses": {source: sources.count(source) for source in sorted(set(sources))},
        "metrics": validation.metrics,
        "seconds": seconds,
    }


def table(results: dict[str, Any]) -> str:
    """Returns one line for each set and core metric, with its 95 % interval over prompts if there is one."""
    metrics = results["metrics"]
    lines = []
    for name, value in metrics.items():
        section, _, rest = name.partition("/")
        if section == "val-core" and not name.endswith("/std"):
            low, high = (metrics.get(f"val-aux/{rest}/ci95_{end}") for end in ("low", "high"))
            lines.append(f"{rest:56} {value:8.4f}" + (f"   95 %: {low:.4f} to {high:.4f}" if low is not None else ""))
    head = f"{results['prompts']} prompts, {sum(results['responses'].values())} responses, {results['seconds']:.0f} s"
    return "\n".join([head, *lines])
