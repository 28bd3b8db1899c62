"""Arguments that several commands have: those that name a configuration, and counts."""

import argparse

from mrl.errors import ConfigError


def add_config(parser: argparse.ArgumentParser, optional: bool = False) -> None:
    """CONFIG, --recipe and --set; with `optional` CONFIG may be left out."""
    parser.add_argument(
        "config", nargs="?" if optional else None, help="a YAML file, such as parallel_configs/tiny-moe/cpu.yaml"
    )
    parser.add_argument("--recipe", help="algorithm settings that come with mrl, by name: gspo, grpo, ...")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="override one value; repeatable",
    )


def positive(text: str) -> int:
    """Reads a count, as argparse's `type`."""
    if not text.removeprefix("-").isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of at most 9 digits")
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def resolved_config(options: argparse.Namespace, check_paths: bool = False):
    """The ResolvedConfig that the arguments name.

    Raises ConfigError; a refusal by the schema has the rules' violations too.

    `check_paths`: those of the files that the rest of a refused configuration names as well.
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

        raise _in_our_words(with_rules(refusal, check_paths), options.overrides) from None


def _in_our_words(refusal, overrides: list[str]):
    """The refusal; a key of verl's that --set gives is answered with what it is here, each for itself."""
    from mrl.config.load import COMMAND_LINE, SchemaRefusal
    from mrl.errors import Violation
    from mrl.tools.import_verl.one_key import in_our_words

    unknown = {v.field: v for v in refusal.violations if v.rule.startswith("unknown key") and v.where == COMMAND_LINE}
    told: list[Violation] = []
    answered = set()
    for text in overrides:
        key, _, value = (part.strip() for part in text.partition("="))
        field = next((field for field in unknown if f"{key}.".startswith(f"{field}.")), None)
        if field is not None and (words := in_our_words(key, value)) is not None:
            told.append(Violation(key, f"unknown key; {words}", where=COMMAND_LINE))
            answered.add(field)
    rest = [v for v in refusal.violations if v.field not in answered or v not in unknown.values()]
    return SchemaRefusal([*told, *rest], refusal.rest)


def refuse_leftovers(options: argparse.Namespace, words: list[str]) -> None:
    """Raises ConfigError where words that no option takes are settings in hydra's way, KEY=VALUE by itself."""
    if not hasattr(options, "overrides") or not all("=" in word and not word.startswith("-") for word in words):
        return
    from mrl.tools.import_verl.one_key import in_our_words

    said = []
    for word in words:
        key, _, value = word.partition("=")
        words_of = None
        if key not in _our_keys():
            words_of = in_our_words(key, value)
        said.append(words_of or f"--set {word}")
    raise ConfigError(f"a setting stands behind --set; {'; '.join(said)}")


def _our_keys() -> set[str]:
    from mrl.config.schema import schema_keys

    return set(schema_keys())
