"""Arguments that several commands share: those that name a configuration, and counts."""

import argparse

from mrl.errors import LONGEST, ConfigError
from mrl.units import MOST_DEVICES

_TOLD = "a YAML file, such as parallel_configs/tiny-moe/cpu.yaml"


def add_config(parser: argparse.ArgumentParser, optional: bool = False, help_text: str = _TOLD) -> None:
    """Adds CONFIG, --recipe and --set. With `optional` CONFIG may be left out. `help_text`: help on it."""
    parser.add_argument("config", nargs="?" if optional else None, help=help_text)
    parser.add_argument("--recipe", help="algorithm settings that come with mrl, by name: gspo, grpo, ...")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override one value; repeatable",
    )
    add_verbose(parser, ", and all headline metrics and phases of a step")


def add_verbose(parser: argparse.ArgumentParser, further: str = "") -> None:
    """Adds --verbose, which every command has that prints violations. `further`: what else it prints whole."""
    parser.add_argument(
        "--verbose",
        action="store_true",
        help=f"print violations of more than {LONGEST} characters whole{further}",
    )


def positive(text: str) -> int:
    """Reads a count of at least 1, as a `type` of argparse."""
    if not text.removeprefix("-").isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of at most 9 digits")
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def devices(text: str) -> int:
    """Reads a number of devices, as a `type` of argparse."""
    count = positive(text)
    if count > MOST_DEVICES:
        raise argparse.ArgumentTypeError(f"must be at most {MOST_DEVICES}")
    return count


def resolved_config(options: argparse.Namespace, check_paths: bool = False):
    """Returns the ResolvedConfig that the arguments name. Raises ConfigError.

    A refusal by the schema also has the violations of the rules. With `check_paths` these include the files that the
    rest of a refused configuration names.
    """
    from mrl.config.load import SchemaRefusal, load_config
    from mrl.config.yaml_tree import dump_value

    run_dir = getattr(options, "run_dir", None)
    own = []
    if run_dir is not None:
        own = [f"trainer.run_dir={dump_value(run_dir)}"]
    try:
        return load_config(options.config, options.recipe, [*options.overrides, *own])
    except SchemaRefusal as refusal:
        from mrl.config.rules import with_rules

        raise _with_mrl_keys(with_rules(refusal, check_paths), options.overrides) from None


def _with_mrl_keys(refusal, overrides: list[str]):
    """Replaces violations for verl's keys, and keys with hydra's signs, by what the key is here. Each is judged
    separately.
    """
    from mrl.config.load import COMMAND_LINE, SchemaRefusal
    from mrl.errors import Violation

    unknown = {v.field: v for v in refusal.violations if v.rule.startswith("unknown key") and v.where == COMMAND_LINE}
    help_text: list[Violation] = []
    answered = set()
    for text in overrides:
        key, _, value = (part.strip() for part in text.partition("="))
        field = next((field for field in unknown if f"{key}.".startswith(f"{field}.")), None)
        if field is not None and (words := _answer(key, value)) is not None:
            help_text.append(Violation(key, f"unknown key; {words}", where=COMMAND_LINE))
            answered.add(field)
    rest = [v for v in refusal.violations if v.field not in answered or v not in unknown.values()]
    return SchemaRefusal([*help_text, *rest], refusal.rest)


def _answer(key: str, value: str) -> str | None:
    """Says what an unknown `key` is here. None where it is neither verl's key nor one of mrl's behind hydra's sign."""
    from mrl.config.schema import schema_keys
    from mrl.tools.import_verl.one_key import as_mrl_key

    bare = key.lstrip("+")
    if bare in schema_keys():
        return f"write the key without hydra's {key.removesuffix(bare)}: --set {bare}={value}"
    return as_mrl_key(bare, value)


def refuse_leftovers(options: argparse.Namespace, words: list[str]) -> None:
    """Raises ConfigError where left-over words are settings in hydra's form: KEY=VALUE alone, +KEY=VALUE or ~KEY."""
    if hasattr(options, "overrides") and all(
        word.startswith("~") or ("=" in word and not word.startswith("-")) for word in words
    ):
        raise ConfigError(f"a setting needs --set before it; {'; '.join(map(_behind_set, words))}")


def _behind_set(word: str) -> str:
    """Rewrites a setting in hydra's form as one for --set."""
    from mrl.config.schema import schema_keys
    from mrl.tools.import_verl.one_key import as_mrl_key

    key, _, value = word.lstrip("+").partition("=")
    if key.startswith("~"):
        key = key.removeprefix("~")
        return f"{key}: a key that is left out has its default; or --set {key}=null, where it may be null"
    said = None
    if key not in schema_keys():
        said = as_mrl_key(key, value)
    return said or f"--set {key}={value}"
