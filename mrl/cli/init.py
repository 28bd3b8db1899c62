"""Implements `mrl init`: asks for model, devices and data, or reads flags, writes a configuration that is planned."""

import argparse
import os
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from mrl.cli.config_arguments import add_verbose
from mrl.errors import ConfigError, InvalidConfig, MrlError, did_you_mean

_QUESTIONS = {
    "model": "model (a folder with a Hugging Face checkpoint, or a name such as Qwen/Qwen3-30B-A3B): ",
    "devices": "devices (how many of which kind, such as 8 x h100-80g, 4x8 a3 for nodes of 8, or 2 x cpu): ",
    "data": "training prompts (a .parquet or .jsonl file in verl's schema; mrl data makes one): ",
}
_COLUMNS = ("prompt", "data_source", "images")  # of rows in verl's schema
_ROWS = 100  # of a file that are looked at
_REWARD = "reward"  # asked for where no rule is known for the rows
_REWARD_QUESTION = "reward (a built-in rule, or a .py file with a compute_score; see docs/rewards.md): "


def add(commands) -> None:
    """Registers the command."""
    init = commands.add_parser(
        "init", help="write a first configuration from a model, devices and data: the fastest layout that fits"
    )
    init.add_argument("--model", metavar="PATH|NAME", help="a checkpoint folder, or a name on the Hugging Face hub")
    init.add_argument("--devices", metavar="'N x NAME'", help="such as '8 x h100', or '4x8 a3' for nodes of 8")
    init.add_argument("--data", metavar="FILE", action="append", help="training prompts; repeatable")
    init.add_argument("--val", metavar="FILE", action="append", default=[], help="validation prompts; repeatable")
    init.add_argument(
        "--reward",
        metavar="RULE|FILE",
        help="a built-in rule, or a .py file with a compute_score; by default the rule of the rows' data_source",
    )
    output = "the file to write; must not exist (default: %(default)s)"
    init.add_argument("-o", "--output", metavar="FILE", default="first.yaml", help=output)
    add_verbose(init)
    init.set_defaults(run=_init)


def _init(options: argparse.Namespace) -> None:
    output = Path(options.output)
    if output.exists():
        raise ConfigError(f"-o {output}: exists; remove it or give another name")
    model, devices, data = _answers(options)
    files = [*data, *_files(options.val)] if options.val else [*data]
    _refuse_missing(files)
    first, found = _first(model, devices, [*data], options.val, _reward(options.reward, files))
    text = "\n".join(_lines(first, options.output))
    missing = list(_missing_files(first))
    plan = _planned(text, look=not missing)
    _write(output, text)
    from mrl.plan.run_plan import verdict

    print(f"written: {output}\n{verdict(plan)}\nlayout: {first.why}")
    print(
        found
        or "note: lengths are usual ones: the data, or a tokenizer at --model, is not on this host to measure with"
    )
    for note in missing:
        print(f"note: {note}")
    print(f"next: mrl doctor; mrl rehearse {output} (in small, on this machine's CPUs); mrl train {output}")


# ---------------------------------------------------------------- questions


def _answers(options: argparse.Namespace) -> tuple[str, Any, list[str]]:
    """Returns (model, devices, data files) from flags, or from a person at the terminal. Raises ConfigError."""
    missing = [name for name in _QUESTIONS if not getattr(options, name)]
    if missing and not sys.stdin.isatty():
        flags = " ".join(f"--{name}" for name in missing)
        raise ConfigError(f"{flags}: not given, and there is no terminal to ask on")
    model = _asked("model", options.model, _model)
    devices = _asked("devices", options.devices, _devices)
    return model, devices, _asked("data", options.data, _files)


def _asked(name: str, given: Any, check: Callable[[Any], Any]) -> Any:
    """Returns the checked answer. Asks a person again until the answer is valid."""
    while not given:
        try:
            answer = input(_QUESTIONS.get(name, _REWARD_QUESTION)).strip()
        except EOFError:
            raise ConfigError(f"--{name}: no answer") from None
        try:
            return check([answer] if name == "data" else answer)
        except MrlError as error:
            print(error, file=sys.stderr)
    return check(given)


def _model(path: str) -> str:
    from mrl.model import planning_model_spec

    planning_model_spec(path)
    return path


def _devices(text: str):
    from mrl.tools.first_config import parse_devices

    return parse_devices(text)


def _files(names: list[str]) -> list[str]:
    """Checks that existing files have the schema. Missing files are noted later. Raises DataError."""
    for name in names:
        if not name:
            raise ConfigError("give the name of a file")
        if Path(name).suffix not in (".parquet", ".jsonl"):
            raise ConfigError(f"{name}: must end in .parquet or .jsonl; mrl data converts public data sets")
        _source_of(name)
    return names


def _source_of(name: str) -> str | None:
    """Returns data_source of the file's first usable row, or None for a missing file. Raises DataError for no usable
    row.
    """
    from mrl.data.row_files import BadRow, parse_row
    from mrl.errors import DataError

    why = "it is empty"
    if not Path(name).is_file():
        return None
    for raw in _first_rows(name):
        try:
            return parse_row(raw, *_COLUMNS)[1]["data_source"]
        except BadRow as problem:
            why = str(problem)
    raise DataError(f"{name}: no row in verl's schema at its beginning ({why}); mrl data converts public data sets")


def _first_rows(name: str) -> Iterator[Any]:
    from mrl.data.row_files import read_rows

    return islice(read_rows([name], *_COLUMNS), _ROWS)


def _shows_images(files: list[str]) -> bool:
    """Tells whether one of the first rows of the files that are here has an image."""
    from mrl.data.row_files import BadRow, images_of

    for name in filter(os.path.isfile, files):
        for raw in _first_rows(name):
            with suppress(BadRow):
                if raw.problem is None and images_of(raw, _COLUMNS[-1]):
                    return True
    return False


# ---------------------------------------------------------------- the file


def _first(path: str, count, train: list[str], val: list[str], reward: dict[str, Any]):
    """Returns the first configuration, and what was measured for it; None where nothing could be.

    The lengths of prompts and responses are those of the data and tokenizer, where both are on this host.
    """
    from mrl.config.schema import DataConfig, RewardConfig
    from mrl.config.yaml_tree import nested
    from mrl.model import planning_model_spec
    from mrl.model.hub import cached_folder
    from mrl.model.trained_tower import FROZEN
    from mrl.tools.first_config import first_config, usual_lengths, usual_prompts
    from mrl.tools.measured_data import measured

    model = planning_model_spec(path)[0]
    data: dict[str, Any] = {"data.train_files": train}
    if val:
        data |= {"data.val_files": val, "trainer.test_freq": 20}
    data |= reward
    sees = model.tower is not None and _shows_images([*train, *val])
    if sees:
        data["model.vision"] = FROZEN
    read = DataConfig(train_batch_size=1, train_files=train, val_files=val)
    found = measured(cached_folder(path), read, RewardConfig.model_validate(nested(reward).get("reward", {})), sees)
    if found is not None:
        prompt, response = found.lengths(model.longest_sample, usual_lengths(model)[1])
        step, mini = found.batch(prompt, *usual_prompts(count))
        data |= {
            "data.max_prompt_length": prompt,
            "data.max_response_length": response,
            "actor.ppo_max_token_len_per_gpu": prompt + response,
            "data.train_batch_size": step,
            "actor.ppo_mini_batch_size": mini,
        }
    return first_config(path, model, count, data), found


def _reward(given: str | None, files: list[str]) -> dict[str, Any]:
    """Returns the keys of a reward that can score the rows: the given one, else the rule of each data_source.

    Asks a person where a data_source has no rule. Raises ConfigError where nobody is there.
    """
    from mrl.reward.builtin_rules import RULES, rule_name

    if given:
        return _reward_named(given)
    unknown = {source for name in files if (source := _source_of(name)) is not None and rule_name(source) not in RULES}
    if not unknown:
        return {}
    if sys.stdin.isatty():
        return _asked(_REWARD, None, _reward_named)
    raise ConfigError(
        f"--reward: not given, and no rule is known for data_source {', '.join(map(repr, sorted(unknown)))}; give a "
        f"file with a compute_score, or one of {', '.join(RULES)}"
    )


def _reward_named(text: str) -> dict[str, Any]:
    from mrl.reward.builtin_rules import RULES

    if text.endswith(".py"):
        if not Path(text).is_file():
            raise ConfigError(f"--reward {text}: no such file")
        return {"reward.custom_reward_function.path": text}
    if text not in RULES:
        raise ConfigError(f"--reward {text}: is no .py file and no rule; {did_you_mean(text, [*RULES])}")
    return {"reward.function": text}


def _lines(first, name: str) -> Iterator[str]:
    """Yields the lines of the file, with every key on its own line below its section."""
    from mrl.config.yaml_tree import dump_value

    yield "# Made by mrl init; planned, not run."
    yield f"# `mrl plan {name}` shows memory and times, `mrl validate {name}` checks it after a change."
    yield "# All keys with their meaning: docs/configuration.md."
    why = f"The layout is the fastest one of the search that fits with the whole plan: {first.why}."
    yield from textwrap.wrap(why, 118, initial_indent="# ", subsequent_indent="# ")
    yield f"recipe: {first.recipe}"
    open_sections: list[str] = []
    for key, value in sorted(first.values.items(), key=lambda item: _position(item[0], list(first.values))):
        *sections, last = key.split(".")
        same = _common(sections, open_sections)
        for depth in range(same, len(sections)):
            yield ("\n" if depth == 0 else "") + "  " * depth + f"{sections[depth]}:"
        open_sections = sections
        yield "  " * len(sections) + f"{last}: {dump_value(value)}"


def _common(one: list[str], other: list[str]) -> int:
    """Returns how many leading sections both have in common."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _position(key: str, keys: list[str]) -> tuple[int, ...]:
    """Returns the sort key of a key: a section stands where its first key stands."""
    parts = key.split(".")
    return tuple(_first_below(".".join(parts[: n + 1]), keys) for n in range(len(parts)))


def _first_below(prefix: str, keys: list[str]) -> int:
    """Returns the position of the first key that is `prefix` or lies in its section."""
    return next(position for position, key in enumerate(keys) if key == prefix or key.startswith(f"{prefix}."))


def _planned(text: str, look: bool) -> dict[str, Any]:
    """Returns the plan of the configuration as it will be read.

    Raises what `mrl validate` would say: InvalidConfig, and DataError for rows that the reward cannot score. `look`:
    whether the files are there to be looked at.
    """
    from mrl.cli.validate import check_config, look_at_files
    from mrl.config.load import load_config
    from mrl.model import planning_model_spec
    from mrl.plan.plan_inputs import device_for
    from mrl.plan.run_plan import plan_of

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "first.yaml")
        file.write_text(text + "\n", encoding="utf-8")
        resolved = load_config(str(file))
    broken = check_config(resolved)[0]
    if look and not broken:
        broken = look_at_files(resolved, [], False)[0]
    if broken:
        raise InvalidConfig(broken)
    config = resolved.config
    return plan_of(config, planning_model_spec(config.model.path)[0], device_for(config))


def _write(output: Path, text: str) -> None:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("x", encoding="utf-8") as file:  # must not overwrite a file that appeared meanwhile
            file.write(text + "\n")
    except OSError as error:
        raise ConfigError(f"-o {output}: cannot be written: {error.strerror}") from None


def _refuse_missing(files: list[str]) -> None:
    """Raises ConfigError for a file that is not in its folder, which is on this host: `mrl validate` refuses it too."""
    for name in files:
        path = Path(name).absolute()
        if path.is_dir():
            raise ConfigError(f"{name}: is a folder; give the files in it")
        if path.parent.is_dir() and not path.is_file():
            raise ConfigError(f"{name}: no such file in {path.parent}")


def _missing_files(first) -> Iterator[str]:
    for key in ("data.train_files", "data.val_files"):
        for name in first.values.get(key, ()):
            if not Path(name).is_file():
                yield f"{key}: {name} is not there yet"
