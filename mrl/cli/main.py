"""The command line: parses arguments, calls the command and prints errors.

Exit codes are those of mrl.errors. An unexpected error keeps its traceback and ends with 1.
"""

import sys

try:
    import argparse
    import os
    import signal
    import textwrap
    import traceback
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
    from types import ModuleType
    from typing import Any, TextIO

    from mrl.cli import (
        compare,
        completion,
        convert,
        data,
        doctor,
        eval,
        explain,
        family,
        import_verl,
        init,
        plan,
        rehearse,
        report,
        samples,
        submit,
        train,
        validate,
        verify,
        watch,
    )
    from mrl.cli.config_arguments import refuse_leftovers
    from mrl.errors import VERBOSE, ConfigError, EnvironmentFault, Interrupted, MrlError, printable
    from mrl.record.lossy_output import lossy
    from mrl.tools.own_command import DEFECT, SUPERVISED
except KeyboardInterrupt:  # these take half a second, in which a user may change his mind
    print("mrl: interrupted", file=sys.stderr)
    raise SystemExit(5) from None  # mrl.errors.Interrupted.exit_code

GROUPS: dict[str, tuple[ModuleType, ...]] = {
    "begin": (init, import_verl, data, doctor),
    "before a run": (validate, plan, verify, rehearse, family),
    "run": (train, submit, watch, eval),
    "afterwards": (report, compare, samples, explain, convert),
    "shell": (completion,),
}
PASS_ON = ("train", "submit")  # they draw on the terminal, or pass on what a job prints
EXIT_CODES = (
    "exit codes: 0 done, 2 configuration or usage, 3 data, 4 environment, 5 stopped but resumable, 6 numbers that must "
    "not reach the optimizer, 7 a plan that does not fit, 1 a defect",
    "mrl COMMAND --help says more",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `mrl`."""
    _open_closed_streams()
    try:
        _main(arguments)
    except KeyboardInterrupt:
        print("mrl: interrupted", file=sys.stderr)
        raise SystemExit(Interrupted.exit_code) from None
    except Exception:
        if SUPERVISED not in os.environ:
            raise
        traceback.print_exc()
        raise SystemExit(DEFECT) from None


def _open_closed_streams() -> None:
    """Opens the null device as each standard stream that was closed (`>&-`). Files and pipes would take its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)  # also where it was opened under that number
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _main(arguments: Sequence[str] | None) -> None:
    with ExitStack() as stack:
        stack.enter_context(redirect_stderr(_Plain(sys.stderr)))
        parser = make_parser()
        options, leftovers = _parsed(parser, arguments)
        if getattr(options, "verbose", False):
            os.environ[VERBOSE] = "1"
        if options.command in PASS_ON:
            _run(parser, options, leftovers)
            return
        stdout = sys.stdout
        if options.command == "train":  # its output may be on the disk of the run, which may be full for a while
            stdout = lossy(stdout)
            stack.enter_context(redirect_stderr(_Plain(lossy(sys.stderr))))
        stack.enter_context(redirect_stdout(_Answer(stdout)))
        _run(parser, options, leftovers)
        sys.stdout.flush()


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    with redirect_stdout(_Answer(sys.stdout)) as answer:
        try:
            return parser.parse_known_args(arguments)
        finally:
            answer.flush()  # of --help and --version


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace, leftovers: Sequence[str]) -> None:
    if options.run is None:
        options.parser.print_help(sys.stderr)
        raise SystemExit(ConfigError.exit_code)
    try:
        if leftovers:
            refuse_leftovers(options, leftovers)
            parser.error(f"unrecognized arguments: {' '.join(leftovers)}")
        options.run(options)
    except (MrlError, FileNotFoundError) as error:
        error = _of_directory(error)
        print("\n".join([f"mrl {options.command}: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        print(f"mrl {options.command}: interrupted", file=sys.stderr)
        raise SystemExit(Interrupted.exit_code) from None


def _of_directory(error: MrlError | FileNotFoundError) -> MrlError:
    """Returns the error, or what is said where it comes of a current directory that was removed. Raises any other."""
    if isinstance(error, MrlError):
        return error
    try:
        os.getcwd()
    except OSError as gone:
        return EnvironmentFault(
            f"the current directory cannot be used ({gone.strerror}), and relative paths start there; cd to one that "
            "exists"
        )
    raise error


class _Plain:
    """A text stream that makes control characters harmless. Names, messages and answers come from other people."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(printable(text))
        except UnicodeEncodeError:  # a terminal of Latin-1, as the locale or PYTHONIOENCODING says
            encoding = self._stream.encoding
            return self._stream.write(printable(text).encode(encoding, "backslashreplace").decode(encoding))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Answer(_Plain):
    """The output of a command. The command ends quietly once nobody reads on, as behind `| head`."""

    def write(self, text: str) -> int:
        with self._ends_with_its_reader():
            return super().write(text)

    def flush(self) -> None:
        with self._ends_with_its_reader():
            self._stream.flush()

    @contextmanager
    def _ends_with_its_reader(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self._give_up()
            raise SystemExit(128 + signal.SIGPIPE) from None
        except OSError as error:
            self._give_up()
            print(f"mrl: the output cannot be written: {error.strerror}", file=sys.stderr)
            raise SystemExit(EnvironmentFault.exit_code) from None

    def _give_up(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # otherwise the interpreter's flush fails


class _Version(argparse.Action):
    """Prints the versions and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from mrl.cli.versions import version_lines

        print("\n".join(version_lines()))
        parser.exit()


class _Group:
    """Registers commands of one group, whose help lines stand under the group's title."""

    def __init__(self, title: str, commands: Any) -> None:
        self._commands = commands
        self.lines = [f"{title}:"]

    def add_parser(self, name: str, help: str, **options: Any) -> argparse.ArgumentParser:
        """Adds a command as argparse does. Its line in the list of commands also begins its own help."""
        self.lines.append(f"  {name:<13}{help}")
        return self._commands.add_parser(name, **{"description": help[0].upper() + help[1:] + "."} | options)


def make_parser() -> argparse.ArgumentParser:
    """Builds the parser with all commands."""
    parser = argparse.ArgumentParser(
        prog="mrl",
        description="Reinforcement learning of large mixture-of-experts language models on Megatron.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=None, parser=parser)
    parser.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        help="print the installed versions, beside those that were tested together",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands, below in groups")
    groups = [_Group(title, commands) for title in GROUPS]
    for group, modules in zip(groups, GROUPS.values(), strict=True):
        for module in modules:
            module.add(group)
    parser.epilog = "\n\n".join([*("\n".join(group.lines) for group in groups), *map(textwrap.fill, EXIT_CODES)])
    return parser


if __name__ == "__main__":  # python -m mrl.cli.main, where the command is not on the path
    main()
