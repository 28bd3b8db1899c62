"""Implements `mrl completion`, a shell script that completes commands, options, keys of --set, recipes and files.

The script does not call mrl.
"""

import argparse
from collections.abc import Iterator

_BASH = """\
# Completion of mrl for bash: source <(mrl completion bash)
_mrl() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command= word words=
    [ "$cur" = "=" ] && cur=
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case $word in {commands}) command=$word; break ;; esac
    done
    COMPREPLY=()
    case $command:$previous in
{values}
        *:--set) words=$_mrl_keys; compopt -o nospace 2>/dev/null ;;
        *:-o | *:--output | *:--run-dir | *:--checkpoint) ;;
        *)
            case $cur in -*)
                case $command in
{options}
                esac ;;
            *) [ -n "$command" ] || words=$_mrl_commands
                case $command in
{choices}
                esac ;;
            esac ;;
    esac
    [ -z "$words" ] || mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur")
}}
_mrl_commands='{names}'
_mrl_keys='{keys}'
complete -o default -F _mrl mrl
"""
_ZSH = """\
# Completion of mrl for zsh: source <(mrl completion zsh)
autoload -Uz compinit bashcompinit && compinit && bashcompinit
"""


def add(commands) -> None:
    """Registers the command."""
    completion = commands.add_parser("completion", help="print a completion script: source <(mrl completion bash)")
    completion.add_argument("shell", choices=("bash", "zsh"))
    completion.set_defaults(run=lambda options: print(script(options.shell, options.parser), end=""))


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Returns the completion script for the commands of `parser`."""
    from mrl.config.schema import schema_keys

    commands = _commands(parser)
    text = _BASH.format(
        commands=" | ".join(commands),
        names=" ".join(commands),
        keys=" ".join(f"{key}=" for key in schema_keys()),
        values="\n".join(f"        {case} words='{' '.join(words)}' ;;" for case, words in _values(commands)),
        options="\n".join(
            f"                    {name}) words='{' '.join(_options(p))}' ;;" for name, p in commands.items()
        ),
        choices="\n".join(
            f"                    {name}) words='{' '.join(words)}' ;;" for name, words in _choices(commands)
        ),
    )
    if shell == "bash":
        return text
    return _ZSH + text


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Returns parsers by name. argparse has no public way to list them."""
    return {
        name: p
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, p in action.choices.items()
    }


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """Returns the names of a command's options, with those of its subcommands."""
    own = [text for action in parser._actions for text in action.option_strings if text.startswith("--")]
    return list(dict.fromkeys([*own, *(text for p in _commands(parser).values() for text in _options(p))]))


def _values(commands: dict[str, argparse.ArgumentParser]) -> Iterator[tuple[str, list[str]]]:
    """Yields (case, words) for options that take one of a list."""
    from mrl.config.load import available_recipes
    from mrl.plan.devices import devices

    yield "*:--recipe)", list(available_recipes())
    yield "plan:--device)", list(devices())
    for name, parser in commands.items():
        for action in parser._actions:
            if action.option_strings and action.choices:
                yield f"{name}:{action.option_strings[-1]})", list(map(str, action.choices))


def _choices(commands: dict[str, argparse.ArgumentParser]) -> Iterator[tuple[str, list[str]]]:
    """Yields (command, words) for commands whose first argument is one of a list."""
    for name, parser in commands.items():
        words = [
            str(c) for action in parser._actions if not action.option_strings and action.choices for c in action.choices
        ]
        if words:
            yield name, words
