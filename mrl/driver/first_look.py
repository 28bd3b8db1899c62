"""Checks the files of a configuration before anything is started, within two seconds, without Ray or torch. A user's
loss takes as long as torch in a process of its own.

First it reads columns and rows of each file, and asks the user's reward about one row. Then it reads all rows of small
data with their tokens, as the run itself does. It uses the quick tokenizer if there is one, else a process with
transformers and without torch. So it does with images. Of larger data it asks for the model's image processor alone.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mrl.acting.offer import Offer
from mrl.algo.advantages import CUSTOM_ADVANTAGE_KEY, AdvantageInputs, numbers_of, tried_advantage
from mrl.config.schema import AlgorithmConfig, DataConfig, RewardConfig, RunConfig
from mrl.data.dataset import ChatTokenizer, PromptDataset, load_chat_tokenizer
from mrl.data.quick_tokenizer import quick_tokenizer
from mrl.data.row_files import BadRow, parse_row, read_rows
from mrl.driver.assemble_data import (
    check_goes_on,
    check_least_scores,
    checked_dialect,
    image_reader,
    load_training,
    load_validation,
    offer_of,
    prompt_parameters,
    reward_spec,
    rule_in,
)
from mrl.driver.own_loss import try_loss
from mrl.engine.requests import turns_spec
from mrl.errors import ConfigError, DataError, EnvironmentFault
from mrl.model.registry import has_tokenizer
from mrl.reward.items import OK, ONE_TURN, REWARD, SCORE, RewardItem, check_failures, part_of
from mrl.reward.pool import RewardPool, check_function
from mrl.reward.process import PACKAGE_ROOT
from mrl.reward.truths import right_responses
from mrl.units import MIB, counted

if TYPE_CHECKING:
    from mrl.data.image_reader import ImageReader

ROWS_TRIED = 100  # in each file, until one is usable
READ_WHOLE_BYTES = 4 * MIB  # of all files together
PATIENCE_S = 60.0
NONSENSE = "nonsense"  # used as a response
_SHOWN = 40  # characters of a text
_TELLING = (DataError, ConfigError, EnvironmentFault)  # errors that would occur with torch too


@dataclass(frozen=True)
class Looked:
    """What the check has found."""

    fingerprint: str | None = None  # of the training prompts; None: not all were read, too many or not on this host
    bad_rows: tuple[str, ...] = ()  # rows that the run leaves out, a line for each reason and file
    reward: str | None = None  # why the reward failed on some of the texts that it was asked about


def look(config: RunConfig) -> Looked:
    """Checks the files.

    Raises the errors that the run would raise: DataError, and ConfigError for a reward, an advantage, a loss or tools
    that cannot be loaded.
    """
    if (own := config.algorithm.custom_advantage) is not None and Path(own.path).is_file():
        with tried_advantage(own.path, config.algorithm.adv_estimator):
            _try_advantage(config.algorithm, config.rollout.n)
    try_loss(config.algorithm, config.distillation)
    data = config.data
    turns = turns_spec(config.rollout.turns, data, config.rollout.agent)
    offer = None
    if not (turns is None or not turns.tools.is_here):
        offer = offer_of(turns.tools, config.reward)
    check_goes_on(offer, config.trainer)
    here = data.model_copy(update={"train_files": _here(data.train_files), "val_files": _here(data.val_files)})
    sees = config.model.vision is not None  # the run reads the images
    small = _bytes(here) <= READ_WHOLE_BYTES
    bad_rows: tuple[str, ...] = ()
    if small and not sees:
        bad_rows = _read_untokenised(here, rule_in(config.reward))
    firsts = [
        _first_row(file, data, rule_in(config.reward), data.image_key if sees else "")
        for file in (*here.train_files, *here.val_files)
    ]
    sources = {first.fields["data_source"] for first in firsts[: len(here.train_files)] if first is not None}
    check_least_scores(config.algorithm.adv_estimator, config.reward, sources)
    firsts = [first for first in firsts if first is not None]
    if offer is not None and (offer.environments or turns.tools.in_sandbox):
        from mrl.acting.environment_pool import try_environments

        try_environments(turns.tools, offer, [first.fields for first in firsts])
    outcome = {}
    if turns is not None:
        outcome = ONE_TURN
    parts = () if turns is not None else _parts_read(config.algorithm)  # environments give parts of their own
    failed = _ask(config.reward, firsts, outcome, parts)
    reads = here == data and small
    untokenised = Looked(None, bad_rows, failed)
    if not has_tokenizer(config.model.path) or (turns and not offer):
        return untokenised
    rule = rule_in(config.reward)
    asked = _Asked(
        config.model.path, data, config.trainer.seed, offer, turns and turns.template_arguments, reads, rule, sees
    )
    quick = None
    if not sees:
        quick = quick_tokenizer(Path(config.model.path), data.apply_chat_template_kwargs)
    if quick is not None:
        answered = _answered(asked, quick)
    elif "torch" in sys.modules:
        answered = _answered(asked, load_chat_tokenizer(config.model.path, data.apply_chat_template_kwargs))
    else:
        answered = _answered_apart(asked)
    if answered is None:
        return untokenised
    return replace(answered, reward=failed)


def _try_advantage(algorithm: AlgorithmConfig, responses: int) -> None:
    """Asks the user's advantage about a made-up step of two groups. Raises ConfigError if it fails."""
    scores = np.arange(2.0 * responses) % 3
    inputs = AdvantageInputs(
        scores,
        group_ids=np.repeat([0, 1], responses),
        lengths=np.arange(2 * responses) + 1,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        penalties=np.zeros_like(scores) if algorithm.use_kl_in_reward else None,
        parts=dict.fromkeys(algorithm.gdpo_reward_keys, scores),
        part_weights=dict(zip(algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights, strict=False)),
        custom=algorithm.custom_advantage.parameters,
    )
    try:
        numbers_of(algorithm.adv_estimator, inputs)
    except ConfigError:
        raise
    except Exception as error:  # user code may raise anything
        raise ConfigError(
            f"{CUSTOM_ADVANTAGE_KEY}: {algorithm.custom_advantage.path}: asked about a made-up step of two groups, "
            f"{algorithm.adv_estimator} raised {type(error).__name__}: {error}; constants are read from "
            "algorithm.custom_advantage.parameters"
        ) from error


@dataclass(frozen=True)
class _Asked:
    """Questions that need a tokenizer."""

    model_path: str
    data: DataConfig
    seed: int
    offer: Offer | None = None
    template_arguments: Mapping[str, Any] | None = None  # for conversations; None: responses have one turn
    reads: bool = True  # whether all rows are read
    rule: str | None = None  # that judges them; None: a function of the user's
    sees: bool = False  # whether the model reads images, and so needs their processor


def _answered(asked: _Asked, tokenizer: ChatTokenizer) -> Looked | None:
    """Returns what reading all rows has found; None if they are not read.

    Raises DataError, and ConfigError for a model that cannot call tools, or see.
    """
    images = None
    if asked.sees:
        images = image_reader(asked.model_path, asked.data)
    if asked.offer is not None and asked.template_arguments is not None:
        checked_dialect(asked.template_arguments, asked.offer, asked.model_path, tokenizer)
    if asked.reads:
        return _read(tokenizer, asked.data, asked.seed, asked.offer, asked.rule, images)
    return None


def _here(files: Sequence[str]) -> tuple[str, ...]:
    return tuple(file for file in files if Path(file).is_file())


def _bytes(data: DataConfig) -> int:
    return sum(Path(file).stat().st_size for file in (*data.train_files, *data.val_files))


class _Untokenised:
    """Stands in for a tokenizer that is not loaded yet. Each message is one token, so that no prompt is too long."""

    def apply_chat_template(self, conversation: list[dict[str, str]], **_: Any) -> list[int]:
        return [0] * len(conversation)


def _read_untokenised(data: DataConfig, rule: str | None) -> tuple[str, ...]:
    """Reads all rows, without checks of their tokens, and returns the bad ones. Raises DataError."""
    usual = prompt_parameters(data, rule=rule)
    parameters = replace(usual, max_prompt_length=sys.maxsize, apply_chat_template_kwargs={}, enable_thinking=None)
    loaded = [
        PromptDataset.load(files, _Untokenised(), parameters, files_apart=apart)
        for files, apart in ((data.train_files, False), (data.val_files, True))
        if files
    ]
    return _left_out(loaded)


def _left_out(loaded: Sequence[PromptDataset]) -> tuple[str, ...]:
    """Returns the rows that the run leaves out because they are bad, a line for each reason and file."""
    return tuple(str(bad) for prompts in loaded for bad in prompts.report.examples)


@dataclass(frozen=True)
class _Row:
    """A row of a data file, as the reward gets it."""

    file: str
    number: int  # from 1
    fields: dict[str, Any]


def _first_row(file: str, data: DataConfig, rule: str | None, image_key: str) -> _Row | None:
    """Returns the first usable row for the reward; None if the first ROWS_TRIED are unusable.

    `image_key`: column of its images, which are not looked at; empty: rows have none.

    Raises DataError if some of those could be used but for truths that the rule finds in no response.
    """
    parameters = prompt_parameters(data, rule=rule)
    unmatched = None
    for raw in islice(read_rows([file], data.prompt_key, data.reward_fn_key, image_key), ROWS_TRIED):
        with contextlib.suppress(BadRow):
            row = parse_row(raw, data.prompt_key, data.reward_fn_key, image_key)[1]
            try:
                parameters.check_truth(row)
            except BadRow as problem:
                unmatched = unmatched or f"{file}, row {raw.row}: {problem}; so are all of the first {ROWS_TRIED}"
                continue
            return _Row(file, raw.row, row)
    if unmatched is not None:
        raise DataError(unmatched)
    return None


def _parts_read(algorithm: AlgorithmConfig) -> set[str]:
    """Returns the parts of the reward that a step reads by name."""
    names = set(algorithm.gdpo_reward_keys)
    if algorithm.filter_groups.enable:
        names.add(algorithm.filter_groups.metric)
    return names - {SCORE, REWARD}


def _ask(
    reward: RewardConfig, rows: Sequence[_Row], outcome: Mapping[str, Any], parts: Collection[str] = ()
) -> str | None:
    """Loads a user's function that is on this host, or a built-in rule, and asks it about the first row.

    The responses are nonsense, the truth, and the truth in words. A function that uses the network, such as a judge
    that costs, is asked until it has judged one. `outcome` is added to the row's extra_info. Returns what failed. A
    correct function may fail on some answers, so it raises only if all fail. A built-in rule is asked about the truth
    as it wants it said, and has to judge that. Raises DataError, too, where a judged text has no number under one of
    `parts`.
    """
    spec = reward_spec(reward, {row.fields["data_source"] for row in rows})
    custom = reward.custom_reward_function
    if custom is not None and not Path(custom.path).is_file():
        return None
    if custom is not None or not rows:
        check_function(spec)
    if not rows:
        return None
    row = rows[0].fields
    truth, extra_info = row["ground_truth"], {**row["extra_info"], **outcome}
    texts = [NONSENSE, str(truth), f"Answer: {truth}"]
    if custom is None:
        texts = right_responses(reward.function, row["data_source"], truth)
    results = []
    with RewardPool(spec, 1, reward.timeout_s) as pool:
        for number, text in enumerate(texts):
            results += pool.score([RewardItem(number, row["data_source"], text, truth, extra_info)])
            if results[-1].reason == OK and (custom is None or reward.network):
                break
    for result, name in product(results, sorted(parts)):
        if result.reason == OK:
            part_of(result, name)
    failed = [result for result in results if result.reason != OK]
    if not failed:
        return None
    first = failed[0]
    asked = f"{rows[0].file}, row {rows[0].number}: the reward"
    of_first = f"first on {_quoted(texts[first.sample_id])}: {first.reason}: {first.detail}"
    if len(failed) < len(results):
        return f"{asked} failed on {len(failed)} of {counted(len(results), 'text')} that it was tried on, {of_first}"
    try:
        check_failures(results, reward.max_failure_share)
    except DataError as error:
        raise DataError(f"{asked}, tried on {', '.join(map(_quoted, texts))}: {error}") from None
    return f"{asked} failed on all that it was tried on, which reward.max_failure_share allows, {of_first}"


def _quoted(text: str) -> str:
    """Returns a text in quotes, the end of a long one left out."""
    if len(text) <= _SHOWN:
        return repr(text)
    return f"{text[:_SHOWN]!r}..."


def _answered_apart(question: _Asked) -> Looked | None:
    """Asks `_answered` in a process without torch.

    Returns None if that process itself fails, and the run asks again.
    """
    paths = [str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    asked = asdict(question) | {"data": question.data.model_dump(mode="json")}
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "mrl.driver.first_look"],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            timeout=PATIENCE_S,
            check=True,
        )
        found = json.loads(ended.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    for kind in _TELLING:
        if kind.__name__ in found:
            raise kind(found[kind.__name__])
    if found["fingerprint"] is None:
        return None
    return Looked(found["fingerprint"], tuple(found["bad_rows"]))


def _read(
    tokenizer: ChatTokenizer,
    data: DataConfig,
    seed: int,
    offer: Offer | None,
    rule: str | None = None,
    images: "ImageReader | None" = None,
) -> Looked:
    with contextlib.redirect_stdout(io.StringIO()):  # the run prints it, once
        training = load_training(data, seed, tokenizer, offer, rule, images).prompts
        validation = load_validation(data, tokenizer, offer, rule, images)
    loaded = [training] if validation is None else [training, validation]
    return Looked(training.fingerprint, _left_out(loaded))


def _offer(fields: dict[str, Any] | None) -> Offer | None:
    if fields is None:
        return None
    environments = {name: tuple(actions) for name, actions in fields["environments"].items()}
    return Offer(tuple(fields["tools"]), environments, rewards=fields["rewards"], agent=fields["agent"])


def main() -> None:
    """Runs the process without torch.

    Reads the question from standard input and prints the answer as one JSON object.
    """
    sys.modules["torch"] = None  # as if it were not installed: transformers would import all of torch for a tokenizer
    asked = json.load(sys.stdin)
    given = {"data": DataConfig.model_validate(asked["data"]), "offer": _offer(asked["offer"])}
    if asked["template_arguments"] is not None:
        given["template_arguments"] = asked["template_arguments"] | given["data"].template_arguments
    question = _Asked(**{**asked, **given})
    try:
        arguments = question.data.apply_chat_template_kwargs
        answered = _answered(question, load_chat_tokenizer(question.model_path, arguments)) or Looked()
        found = {"fingerprint": answered.fingerprint, "bad_rows": answered.bad_rows}
    except _TELLING as error:
        found = {type(error).__name__: str(error)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
