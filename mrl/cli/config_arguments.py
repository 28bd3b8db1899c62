"""Arguments that several commands have: those that name a configuration, and counts."""

import argparse


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
    """A count, as argparse's `type`."""
    if not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
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
    own = [] if run_dir is None else [f"trainer.run_dir={dump_value(run_dir)}"]
    try:
        return load_config(options.config, options.recipe, [*options.overrides, *own])
    except SchemaRefusal as refusal:
        from mrl.config.rules import with_rules

        raise with_rules(refusal, check_paths) from None
