"""Follows a launch script without running it.

It sets variables, takes branches whose outcome is known, and collects the commands.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from mrl.errors import ConfigError
from mrl.tools.import_verl.expansion import MAX_ITEMS, Expander, Value, Variable, probe_status, unset
from mrl.tools.import_verl.shell_syntax import (
    Case,
    Chain,
    Command,
    CommandBlock,
    For,
    Function,
    If,
    Pipe,
    Simple,
    While,
    Word,
    parse_script,
)

_MAX_STEPS = 20_000
_MAX_DEPTH = 40
# Commands whose arguments set variables.
_DECLARING = frozenset(("export", "local", "declare", "readonly", "typeset"))


@dataclass(frozen=True)
class Launch:
    """A command line with all variables expanded."""

    words: tuple[Value, ...]
    line: int


@dataclass(frozen=True)
class Script:
    """The result of following a script: commands that are neither built-ins nor functions, and remarks with their
    lines.

    `faults` are places that the grammar cannot read. They are left out, so commands may be incomplete.
    """

    commands: tuple[Launch, ...]
    remarks: tuple[str, ...]
    faults: tuple[str, ...] = ()
    variables: frozenset[str] = frozenset()  # variables that it certainly sets
    refusal: str = ""  # how it ends itself with an error, where it does
    lines: tuple[str, ...] = ()


def read_script(text: str, name: str, given: Mapping[str, str], arguments: Sequence[str] = ()) -> Script:
    """Follows a script.

    `given` are variables that the user sets; they win over the script's own. `arguments` is what `$@` stands for.
    Raises ConfigError for a script that is too long, nested too deeply, or does not end.
    """
    parsed = parse_script(text, name)
    reader = _Reader(name, given, [Value(a) for a in arguments])
    for line in parsed.here_documents:
        reader.remark(line, "a here-document, which is not read")
    refusal = ""
    try:
        reader.block(parsed.block)
    except _Exit as end:
        refusal = str(end)
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply") from None
    lines = tuple(text.splitlines())
    return Script(tuple(reader.commands), tuple(reader.remarks), parsed.faults, reader.certain(), refusal, lines)


class _Exit(Exception):
    """Raised where the script ends. Its text says how, where that is an error; else it is empty."""


class _Reader:
    """Follows the tree. The status of a command is True or False where it is known, None where only running it would
    tell.
    """

    def __init__(self, name: str, given: Mapping[str, str], positional: Sequence[Value]) -> None:
        self.name = name
        self.given = dict(given)
        self.variables: dict[str, Variable] = {key: Value(text) for key, text in given.items()}
        self.expander = Expander(self.variables, positional, name)
        self.named_ones: set[str] = set()
        self.functions: dict[str, CommandBlock] = {}
        self.commands: list[Launch] = []
        self.remarks: list[str] = []
        self.steps = self.depth = 0
        self.doubt: frozenset[str] = frozenset()  # variables that the last undecided condition depends on
        self.said = ""  # the last line that the script itself prints

    def remark(self, line: int, text: str) -> None:
        entry = f"{self.name}:{line}: {text}"
        if entry not in self.remarks:
            self.remarks.append(entry)

    def block(self, block: CommandBlock) -> bool | None:
        status: bool | None = True
        before = dict(self.variables)
        for command in block.commands:
            status = self.command(command)
        if block.subshell:
            self.restore(before)
        return status

    def certain(self) -> frozenset[str]:
        """Returns the variables that the script sets whatever branch it takes."""
        ends = {name: self.variables.get(name) for name in self.named_ones}
        return frozenset(n for n, end in ends.items() if not isinstance(end, Value) or end.text != unset(n).text)

    def restore(self, variables: Mapping[str, Variable]) -> None:
        self.variables.clear()
        self.variables.update(variables)

    def command(self, command: Command) -> bool | None:
        self.steps += 1
        if self.steps > _MAX_STEPS:
            raise ConfigError(f"{self.name}: more than {_MAX_STEPS} commands, which is no launch script")
        match command:
            case Simple():
                return self.simple(command)
            case CommandBlock():
                return self.block(command)
            case Chain():
                return self.chain(command)
            case Pipe():
                return self.pipe(command)
            case If():
                return self.if_(command)
            case Case():
                return self.case(command)
            case For():
                return self.for_(command)
            case Function():
                self.functions[command.name] = command.body
            case While():
                return self.while_(command)
        return True

    def chain(self, chain: Chain) -> bool | None:
        status: bool | None = True
        self.doubt = frozenset()
        for operator, command in chain.links:
            if operator == "" or status is (operator == "&&"):
                status = self.command(command)
            elif status is None:
                status = self.maybe(lambda c=command: self.command(c), self.doubt)
        return status

    def pipe(self, pipe: Pipe) -> bool | None:
        for command in pipe.commands:
            status = self.command(command)
        if not pipe.negated or status is None:
            return status
        return not status

    def if_(self, node: If) -> bool | None:
        for i, (condition, body) in enumerate(node.branches):
            self.doubt = frozenset()
            status = self.block(condition)
            if status is True:
                return self.block(body)
            if status is None:
                rest = If(node.branches[i + 1 :], node.otherwise)
                return self.either([lambda b=body: self.block(b), lambda r=rest: self.if_(r)], self.doubt)
        return self.block(node.otherwise)

    def case(self, node: Case) -> bool | None:
        value = self.expander.text(node.word)
        bodies = []
        for patterns, body in node.branches:
            texts = [self.expander.text(p) for p in patterns]
            if value.known and all(t.known for t in texts):
                if any(fnmatchcase(value.text, t.text) for t in texts):
                    return self.block(body)
            else:
                bodies.append(body)
        if not bodies:
            return True
        self.remark(node.line, f"which branch is taken depends on {', '.join(sorted(value.missing))}")
        ends_all = any(word.text == "*" for patterns, _ in node.branches for word in map(self.expander.text, patterns))
        nothing = []
        if not ends_all:
            nothing = [lambda: None]
        return self.either([*(lambda b=b: self.block(b) for b in bodies), *nothing], value.missing)

    def for_(self, node: For) -> bool | None:
        for value in self.expander.fields(node.words):
            self.set(node.name, value)
            self.block(node.body)
        return True

    def maybe(self, action: Callable[[], bool | None], doubt: frozenset[str] = frozenset()) -> bool | None:
        return self.either([action, lambda: None], doubt)

    def either(self, actions: Sequence[Callable[[], bool | None]], doubt: frozenset[str]) -> None:
        """Follows each action from the present variables. Afterwards only values that all of them agree on are known.

        `doubt` are the variables that decide which of them is taken.
        """
        before = dict(self.variables)
        ends = []
        for action in actions:
            self.restore(before)
            try:
                action()
            except _Exit:
                continue
            ends.append(dict(self.variables))
        if not ends:
            raise _Exit
        self.restore(ends[0])
        for name in {name for end in ends for name in end}:
            if any(end.get(name) != ends[0].get(name) for end in ends):
                self.variables[name] = _common(name, [end.get(name, ()) for end in ends], doubt)

    def while_(self, node: While) -> bool | None:
        """Skips a loop over arguments (`while [ $# -gt 0 ]`) where there are none. The end of others is not known."""
        self.expander.counts_arguments = True
        status = self.block(node.condition)
        self.expander.counts_arguments = False
        if status is node.until:
            return True
        self.remark(node.line, "a loop whose end cannot be known: what it sets is unknown")
        return self.maybe(lambda: self.block(node.body), self.doubt)

    def simple(self, command: Simple) -> bool | None:
        words = list(command.words)
        while words and (assigned := _assignment(words[0])) is not None:
            self.assign(*assigned)
            words.pop(0)
        if not words:
            return True
        if len(words) == 1 and words[0].parts[0].kind == "arithmetic":
            return self.truth(self.expander.text(words[0]), command.line)
        fields = self.expander.fields(words)
        if not fields:
            return True
        name = fields[0].text
        if name in _DECLARING:
            for word in words[1:]:
                if (assigned := _assignment(word)) is not None:
                    self.assign(*assigned)
            return True
        return self.named(name, fields, command.line)

    def named(self, name: str, fields: list[Value], line: int) -> bool | None:
        match name:
            case "[" | "[[" | "test":
                return self.test(fields[1:], line)
            case "exit" | "return" | "exec" if name != "exec" or len(fields) == 1:
                if name == "exit":
                    raise _Exit(self.refusal(fields, line))
                return None
            case "unset":
                for field in fields[1:]:
                    self.variables.pop(field.text, None)
                return True
            case "source" | ".":
                self.remark(line, f"{' '.join(f.text for f in fields)}: that file is not read, what it sets is unknown")
                return None
            case "echo" | "printf":
                self.said = " ".join(field.text for field in fields[1:])
                return True if name == "echo" else None
            case "cd":
                self.enter(fields)
                return None
            case "set" | "shift" | "true" | ":" | "mkdir" | "ulimit" | "trap" | "sleep":
                if name in ("mkdir", "sleep"):
                    return None
                return True
            case "false":
                return False
        if (status := probe_status(fields)) is not None:
            self.remark(line, f"asks for devices ({' '.join(f.text for f in fields)}): read as on a machine with GPUs")
            return status
        if name in self.functions:
            return self.call(name, fields[1:])
        self.commands.append(Launch(tuple(fields), line))
        return None

    def refusal(self, fields: list[Value], line: int) -> str:
        """Says how `exit` ends the script. Empty for a success."""
        status = fields[1].text if len(fields) > 1 else "0"
        if status == "0":
            return ""
        return f"{self.name}:{line}: the script ends itself (exit {status})" + (f": {self.said}" if self.said else "")

    def enter(self, fields: list[Value]) -> None:
        """Follows `cd`: $PWD is a known folder, or unknown from here on."""
        before = self.variables.get("PWD")
        self.given.pop("PWD", None)
        self.variables.pop("PWD", None)
        target = fields[1] if len(fields) == 2 else unset("PWD")
        if target.known and isinstance(before, Value) and before.known and ".." not in target.text:
            self.variables["PWD"] = Value(str(PurePosixPath(before.text) / target.text))

    def call(self, name: str, arguments: list[Value]) -> bool | None:
        if self.depth >= _MAX_DEPTH:
            raise ConfigError(f"{self.name}: the function {name} calls itself without end")
        outer = self.expander.positional
        self.depth = self.depth + 1
        self.expander.positional = tuple(arguments)
        status = self.block(self.functions[name])
        self.expander.positional = outer
        self.depth = self.depth - 1
        return status

    def assign(self, name: str, word: Word, appended: bool) -> None:
        array = next((part for part in word.parts if part.kind == "array"), None)
        current = self.variables.get(name)
        if "[" in name:  # single items are not followed: from here on the whole array is unknown
            array_name = name.partition("[")[0]
            self.set(array_name, unset(array_name))
            return
        if array is not None:
            items = tuple(self.expander.fields(array.words))
            if appended:
                items = _items(current) + items
            if len(items) > MAX_ITEMS:
                raise ConfigError(
                    f"{self.name}:{word.line}: {name} grows over {MAX_ITEMS} items, which no launch script needs"
                )
            self.set(name, items)
            return
        value = self.expander.text(word)
        if appended and isinstance(current, Value):
            value = current + value
        elif appended:
            value = Value("") + value
        self.set(name, value)

    def set(self, name: str, value: Variable) -> None:
        """Sets a variable, unless the user did.

        An unknown value that no `--set` can give becomes unknown under this variable's name.
        """
        if name in self.given:
            return
        if isinstance(value, Value) and any(m.startswith("$") for m in value.missing):
            value = Value(value.text, frozenset(name if m.startswith("$") else m for m in value.missing), value.line)
        self.variables[name] = value
        self.named_ones.add(name)

    def truth(self, value: Value, line: int) -> bool | None:
        """Whether `((...))` is true, that is, not zero. None where that is not known."""
        if not value.known:
            self.doubt = value.missing
            self.remark(line, f"a condition depends on {', '.join(sorted(value.missing))}")
            return None
        return value.text != "0"

    def test(self, fields: list[Value], line: int) -> bool | None:
        arguments = [f for f in fields if f.text not in ("]", "]]")]
        if missing := frozenset().union(*(a.missing for a in arguments)):
            self.doubt = missing
            self.remark(line, f"a condition depends on {', '.join(sorted(missing))}")
            return None
        return _test([a.text for a in arguments])


def _items(variable: Variable | None) -> tuple[Value, ...]:
    """Returns the items of a variable: of an array all, of a text the text alone."""
    if variable is None:
        return ()
    if isinstance(variable, tuple):
        return variable
    return (variable,)


def _common(name: str, values: Sequence[Variable], doubt: frozenset[str]) -> Variable:
    """Joins the values that branches leave in a variable.

    What all branches have comes first, for arrays and for texts that were appended to. One unknown item follows with
    what only some have. So a command that uses the variable reports the loss.
    """
    if all(isinstance(value, tuple) for value in values):
        shared = [item for item in values[0] if all(item in value for value in values[1:])]
        rest = [item for value in values for item in value if item not in shared]
        return (*shared, _some(name, rest, doubt))
    if not all(isinstance(value, Value) for value in values):
        return unset(name)
    head = min(values, key=lambda value: len(value.text))
    if "=" not in head.text or not all(f"{value.text} ".startswith(f"{head.text} ") for value in values):
        return unset(name)
    rest = [
        Value(value.text.removeprefix(head.text).strip(), line=value.line)
        for value in values
        if value.text != head.text
    ]
    return head + Value(" ") + _some(name, rest, doubt)


def _some(name: str, items: Sequence[Value], doubt: frozenset[str]) -> Value:
    """Returns a placeholder for items of which only some exist."""
    texts = " ".join(dict.fromkeys(item.text for item in items))
    return Value(
        f"${{{name}: {texts}}}", doubt or frozenset((f"a condition that decides about {name}",)), items[0].line
    )


def _assignment(word: Word) -> tuple[str, Word, bool] | None:
    """Returns (name, value, whether it is appended) of `name=value`, `name+=value` or `name[i]=value`, else None."""
    first = word.parts[0]
    if first.kind != "text" or first.quoted or "=" not in first.text:
        return None
    name, _, rest = first.text.partition("=")
    appended = name.endswith("+")
    name = name.removesuffix("+")
    if not name.partition("[")[0].isidentifier():
        return None
    value = ([type(first)("text", rest)] if rest or len(word.parts) == 1 else []) + list(word.parts[1:])
    return name, Word(tuple(value), word.line), appended


def _test(arguments: list[str]) -> bool | None:
    """Evaluates a condition of known texts. None where it asks for files or is not supported."""
    match arguments:
        case ["!", *rest]:
            status = _test(rest)
            if status is None:
                return status
            return not status
        case [first, "&&" | "-a", *rest]:
            return _both([first], rest)
        case [a, operator, b, "&&" | "-a", *rest]:
            return _both([a, operator, b], rest)
        case ["-z", text]:
            return text == ""
        case ["-n", text] | [text]:
            return text != ""
        case [a, "=" | "==", b]:
            return fnmatchcase(a, b)
        case [a, "!=", b]:
            return not fnmatchcase(a, b)
        case [a, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as operator, b]:
            return _compare(a, operator, b)
    return None


def _both(left: list[str], right: list[str]) -> bool | None:
    statuses = (_test(left), _test(right))
    if False in statuses:
        return False
    if None in statuses:
        return None
    return True


def _compare(a: str, operator: str, b: str) -> bool | None:
    try:
        x = int(a)
        y = int(b)
    except ValueError:
        return None
    return {"-eq": x == y, "-ne": x != y, "-lt": x < y, "-le": x <= y, "-gt": x > y, "-ge": x >= y}[operator]
