"""The command line: parse, call, print.

Exit codes are those of mrl.errors; anything unforeseen keeps its traceback and ends with 1.
"""

import argparse
import sys
from collections.abc import Sequence

from mrl.cli import convert, data, doctor, eval, import_verl, plan, rehearse, submit, train, validate, verify
from mrl.errors import ConfigError, Interrupted, MrlError

COMMANDS = (train, eval, validate, convert, data, submit, doctor, plan, rehearse, verify, import_verl)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `mrl`."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.run is None:
        options.parser.print_help(sys.stderr)
        raise SystemExit(ConfigError.exit_code)
    try:
        options.run(options)
    except MrlError as error:
        print(f"mrl {options.command}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        print(f"mrl {options.command}: interrupted", file=sys.stderr)
        raise SystemExit(Interrupted.exit_code) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mrl", description="Reinforcement learning of large mixture-of-experts models on Megatron."
    )
    parser.set_defaults(run=None, parser=parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser
