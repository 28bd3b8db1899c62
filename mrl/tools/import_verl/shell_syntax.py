"""Parses shell text into a tree of commands, with the grammar tree-sitter-bash.

Only this file knows the names of the grammar's nodes. shell.py interprets commands, expansion.py interprets words.
"""

import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from mrl.errors import ConfigError

MAX_TEXT = 500_000  # characters in a script; real ones have a few thousand
_SHOWN = 60  # characters shown of a fault's text
_CONTINUED = b"\\\n"
_HOME = re.compile(r"((?:[A-Za-z_]\w*=)?)~(?=/|\Z)")  # ~/data, and x=~/data, also as an argument
_HOME_BY_DEFAULT = re.compile(r"^(\w+:?[-=+])~(?=/|\Z)")  # of ${x:-~/data}
# the grammar reads these as names of commands where nothing was opened
_RESERVED = frozenset(("then", "fi", "else", "elif", "do", "done", "esac", "}"))
_REDIRECTS = frozenset(("file_redirect", "herestring_redirect", "heredoc_redirect"))
_CONDITIONS = frozenset(("binary_expression", "unary_expression", "parenthesized_expression"))  # inside [ ] and [[ ]]
_EXPANSIONS = frozenset(("simple_expansion", "expansion", "arithmetic_expansion", "command_substitution"))
_QUOTES = frozenset(("string", "raw_string", "ansi_c_string", "process_substitution"))  # plain text in double quotes
_CLOSERS = frozenset("\"'`)}")


@dataclass(frozen=True)
class WordPart:
    """A piece of a word. `text` is the inside of quotes, of ${...}, of $((...)) or of $(...)."""

    kind: Literal["text", "variable", "arithmetic", "command", "array"]
    text: str
    quoted: bool = False
    words: tuple["Word", ...] = ()  # items of an array


@dataclass(frozen=True)
class Word:
    parts: tuple[WordPart, ...]
    line: int


@dataclass(frozen=True)
class Simple:
    words: tuple[Word, ...]
    line: int


@dataclass(frozen=True)
class CommandBlock:
    """Commands one after the other. What a subshell sets is gone afterwards."""

    commands: tuple["Command", ...]
    subshell: bool = False


@dataclass(frozen=True)
class Chain:
    """`a && b || c`. Each operator stands before the command that it leads to; the first is ""."""

    links: tuple[tuple[str, "Command"], ...]


@dataclass(frozen=True)
class Pipe:
    commands: tuple["Command", ...]
    negated: bool = False


@dataclass(frozen=True)
class If:
    branches: tuple[tuple[CommandBlock, CommandBlock], ...]  # condition, what follows
    otherwise: CommandBlock


@dataclass(frozen=True)
class Case:
    word: Word
    branches: tuple[tuple[tuple[Word, ...], CommandBlock], ...]
    line: int


@dataclass(frozen=True)
class For:
    name: str
    words: tuple[Word, ...]
    body: CommandBlock
    line: int


@dataclass(frozen=True)
class While:
    condition: CommandBlock
    body: CommandBlock
    line: int
    until: bool = False


@dataclass(frozen=True)
class Function:
    name: str
    body: CommandBlock


Command = Simple | CommandBlock | Chain | Pipe | If | Case | For | While | Function


@dataclass(frozen=True)
class ParsedScript:
    """The commands of a script.

    `here_documents` are the lines where they begin. `faults` are all places that the grammar cannot read, with line and
    text.
    """

    block: CommandBlock
    here_documents: tuple[int, ...]
    faults: tuple[str, ...]


def parse_script(text: str, name: str) -> ParsedScript:
    """Parses a script; here-documents are skipped. Raises ConfigError where it is too long or nested too deeply."""
    if len(text) > MAX_TEXT:
        raise ConfigError(f"{name}: {len(text)} characters are no launch script (at most {MAX_TEXT})")
    try:
        return _TreeReader(_with_plain_ends(text), name).script()
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply") from None


def parse_text(text: str, line: int, name: str) -> Word:
    """Parses text with expansions, as in `${x:-HERE}`, and keeps its blanks. Raises ConfigError for what cannot be
    read.
    """
    reader = _TreeReader("${_:-" + text + "}", name, line)
    expansion = next(_outermost((reader.root,), ("expansion",)), reader.root)
    if reader.faults() or expansion.end_byte != len(reader.source):
        raise ConfigError(f"{name}:{line}: cannot be read as shell: {text[:_SHOWN]}")
    parts = reader.parts(expansion.children, len("${_:-"), expansion.end_byte - 1)
    return Word(tuple(parts) or (WordPart("text", ""),), line)


@cache
def _parser() -> Parser:
    return Parser(Language(tree_sitter_bash.language()))


def _with_plain_ends(text: str) -> str:
    """Lines end in \\n alone, and the last one is not continued:
    the shell overlooks a backslash at the end of a file. `$(((a + b) * 2))` gets a blank that the grammar needs where
    it stands in a default (`${x:-...}`).
    """
    text = text.replace("\r\n", "\n").replace("\r", " ").replace("$(((", "$(( (")
    return re.sub(r"(?<!\\)\\\s*\Z", "\n", text)


class _TreeReader:
    """Reads one syntax tree. `first_line` is the line at which the text starts."""

    def __init__(self, text: str, name: str, first_line: int = 1) -> None:
        self.source = text.encode()
        self.name = name
        self.first_line = first_line
        self.root = _parser().parse(self.source).root_node
        self.here_documents: list[int] = []

    def script(self) -> ParsedScript:
        block = self.block(self.root.children)
        return ParsedScript(block, tuple(self.here_documents), tuple(self.faults()))

    def line(self, node: Node) -> int:
        return self.first_line + node.start_point.row

    def text(self, start: int, end: int) -> str:
        return self.source[start:end].decode(errors="replace")

    def faults(self) -> list[str]:
        """Returns one line of text for each node of the tree that is an error or missing."""
        nodes = (node for node in _walk(self.root) if _is_fault(node))
        return list(dict.fromkeys(f"{self.name}:{self.line(node)}: {self.fault(node)}" for node in nodes))

    def fault(self, node: Node) -> str:
        if node.is_missing:
            if node.type in _CLOSERS:
                return f"no closing {node.type}"
            return f"{node.type} is missing"
        shown = self.text(node.start_byte, node.end_byte).strip()
        start = next(iter(shown.splitlines()), "")[:_SHOWN]
        if node.type == "command_name":
            return f"{start} without its beginning"
        if shown.startswith(("'", '"')):
            return f"no closing {shown[0]}: {start}"
        return f"cannot be read as shell: {start}"

    # --- commands

    def block(self, nodes: Sequence[Node], subshell: bool = False) -> CommandBlock:
        commands = (self.command(node) for node in nodes if node.is_named)
        return CommandBlock(tuple(command for command in commands if command is not None), subshell)

    def command(self, node: Node) -> Command | None:
        """Reads a command. None for a comment, and for what cannot be read, which is among the faults."""
        match node.type:
            case "command" | "declaration_command" | "unset_command" | "test_command" | "variable_assignments":
                return Simple(self.words(self.word_nodes(node)), self.line(node))
            case "variable_assignment":
                return Simple((self.assignment(node),), self.line(node))
            case "redirected_statement":
                return self.redirected(node)
            case "list":
                return self.chain(node)
            case "pipeline":
                return self.pipe(node)
            case "negated_command":
                return Pipe(self.block(node.children).commands, negated=True)
            case "subshell":
                return self.block(node.children, subshell=True)
            case "compound_statement":
                return self.compound(node)
            case "if_statement":
                return self.if_(node)
            case "case_statement":
                return self.case(node)
            case "for_statement":
                return self.for_(node)
            case "c_style_for_statement":
                return self.counting(node)
            case "while_statement":
                condition = self.block(node.children_by_field_name("condition"))
                return While(condition, self.body(node), self.line(node), until=node.children[0].type == "until")
            case "function_definition":
                return self.function(node)
        return None

    def word_nodes(self, node: Node) -> Iterator[Node]:
        """Yields the nodes of a command's words. The grammar puts words behind a redirection among its targets."""
        for child in node.children:
            if child.type in _REDIRECTS:
                yield from self.behind_redirect(child)
            elif child.type in _CONDITIONS:
                yield from self.word_nodes(child)
            elif child.type not in ("comment", "ERROR") and not child.is_missing and child.end_byte > child.start_byte:
                yield child

    def behind_redirect(self, node: Node) -> list[Node]:
        return [*node.children_by_field_name("destination")[1:], *node.children_by_field_name("argument")]

    def words(self, nodes: Iterable[Node]) -> tuple[Word, ...]:
        """Turns nodes into words. Two nodes with nothing but a continued line between them are one word."""
        words: list[Word] = []
        end = -1
        for node in nodes:
            word = self.assignment(node) if node.type == "variable_assignment" else self.word(node)
            if words and self.source[end : node.start_byte] in (b"", _CONTINUED):
                words[-1] = Word(_joined(words[-1].parts, word.parts), words[-1].line)
            else:
                words.append(word)
            end = node.end_byte
        return tuple(words)

    def redirected(self, node: Node) -> Command | None:
        body = node.child_by_field_name("body")
        command = self.command(body) if body is not None else CommandBlock(())
        for redirect in node.children_by_field_name("redirect"):
            extra = self.words(self.behind_redirect(redirect))
            command = _with_words(command, extra) if command is not None and extra else command
            if redirect.type == "heredoc_redirect":
                command = self.behind_here_document(redirect, command or CommandBlock(()))
        return command

    def behind_here_document(self, node: Node, command: Command) -> Command:
        """Reads the rest of the line with `<<END`, which the grammar makes part of the here-document."""
        rows = [child for child in node.children if child.type in ("heredoc_body", "heredoc_end")]
        self.here_documents.append(self.line(rows[0] if rows else node))
        operator = node.child_by_field_name("operator")
        for child in node.children:
            if child.type == "pipeline":
                command = Pipe((command, self.pipe(child)))
            elif operator is not None and (following := self.command(child)) is not None:
                command = Chain((("", command), (operator.type, following)))
        return command

    def chain(self, node: Node) -> Chain:
        links: list[tuple[str, Command]] = []
        operator = ""
        for child in node.children:
            if child.type in ("&&", "||"):
                operator = child.type
            elif (command := self.command(child)) is not None:
                links += command.links if child.type == "list" and not links else [(operator, command)]
        return Chain(tuple(links))

    def pipe(self, node: Node) -> Pipe:
        commands = self.block(node.children).commands
        first = None
        if commands:
            first = commands[0]
        if isinstance(first, Pipe) and first.negated:  # `! a | b` negates what b says
            return Pipe((*first.commands, *commands[1:]), negated=True)
        return Pipe(commands)

    def compound(self, node: Node) -> Command:
        if node.children[0].type != "((":
            return self.block(node.children)
        inside = self.text(node.children[0].end_byte, node.children[-1].start_byte)
        return Simple((Word((WordPart("arithmetic", inside),), self.line(node)),), self.line(node))

    def if_(self, node: Node) -> If:
        clauses = [node, *(child for child in node.children if child.type == "elif_clause")]
        otherwise = [part for child in node.children if child.type == "else_clause" for part in child.children]
        return If(tuple(self.branch(clause) for clause in clauses), self.block(otherwise))

    def branch(self, node: Node) -> tuple[CommandBlock, CommandBlock]:
        then = next((i for i, child in enumerate(node.children) if child.type == "then"), len(node.children))
        return self.block(node.children[:then]), self.block(node.children[then:])

    def case(self, node: Node) -> Case:
        branches = tuple(self.case_branch(child) for child in node.children if child.type == "case_item")
        return Case(self.word(node.child_by_field_name("value")), branches, self.line(node))

    def case_branch(self, node: Node) -> tuple[tuple[Word, ...], CommandBlock]:
        values = node.children_by_field_name("value")
        end = values[-1].end_byte if values else node.start_byte
        behind = [child for child in node.children if child.start_byte >= end]
        return tuple(self.word(value) for value in values), self.block(behind)

    def for_(self, node: Node) -> For:
        if node.children[0].type == "select":
            raise ConfigError(f"{self.name}:{self.line(node)}: select asks a person, and is not read")
        name = node.child_by_field_name("variable")
        values = self.words(node.children_by_field_name("value"))
        return For(self.text(name.start_byte, name.end_byte), values, self.body(node), self.line(node))

    def counting(self, node: Node) -> While:
        """Reads `for ((i = 0; i < n; i++))` as a loop whose end and variables are unknown."""
        head = self.text(node.start_byte, node.child_by_field_name("body").start_byte)
        line = self.line(node)
        text = head[head.index("((") + 2 : head.rindex("))")]
        unknown = WordPart("arithmetic", text)
        names = dict.fromkeys(re.findall(r"([A-Za-z_]\w*)\s*=(?!=)", text))
        set_to = tuple(Simple((Word((WordPart("text", f"{name}="), unknown), line),), line) for name in names)
        condition = CommandBlock((Simple((Word((unknown,), line),), line),))
        return While(condition, CommandBlock((*set_to, *self.body(node).commands)), line, until=False)

    def body(self, node: Node) -> CommandBlock:
        body = node.child_by_field_name("body")
        return self.block(body.children if body is not None else ())

    def function(self, node: Node) -> Function:
        name = node.child_by_field_name("name")
        body = node.child_by_field_name("body")
        block = self.block([body] if body is not None else ())
        if len(block.commands) == 1 and isinstance(block.commands[0], CommandBlock):
            block = block.commands[0]
        return Function(self.text(name.start_byte, name.end_byte), block)

    # --- words

    def assignment(self, node: Node) -> Word:
        value = node.child_by_field_name("value")
        if value is None:
            return self.word(node)
        head = WordPart("text", self.text(node.start_byte, value.start_byte))
        if value.type != "array":
            return Word((head, *self.word(value).parts), self.line(node))
        items = [child for child in value.children if child.is_named and child.type not in ("comment", "ERROR")]
        return Word((head, WordPart("array", "", words=self.words(items))), self.line(node))

    def word(self, node: Node) -> Word:
        parts = tuple(self.parts((node,), node.start_byte, node.end_byte)) or (WordPart("text", ""),)
        if (found := _HOME.match(self.text(node.start_byte, node.end_byte))) is not None:
            first = WordPart("text", found[1])
            rest = replace(parts[0], text=parts[0].text[found.end() :])
            parts = (first, WordPart("variable", "HOME"), rest, *parts[1:])
        return Word(parts, self.line(node))

    def parts(self, nodes: Sequence[Node], start: int, end: int, quoted: bool = False) -> Iterator[WordPart]:
        """Yields the parts of the bytes from `start` to `end`, which contain `nodes`.

        Blanks that the grammar leaves out are text as well.
        """
        literal = _quoted_text if quoted else _plain_text
        for child in _outermost(nodes, _EXPANSIONS if quoted else _EXPANSIONS | _QUOTES):
            opening = child.end_byte - len(self.source[child.start_byte : child.end_byte].lstrip())
            if text := literal(self.text(start, opening)):
                yield WordPart("text", text, quoted)
            yield from self.special(child, self.text(opening, child.end_byte), quoted)
            start = child.end_byte
        if text := literal(self.text(start, end)):
            yield WordPart("text", text, quoted)

    def special(self, node: Node, text: str, quoted: bool) -> Iterable[WordPart]:
        """Returns the parts of a quoted text or of an expansion."""
        match node.type:
            case "string":
                end = node.end_byte - (not node.children[-1].is_missing)
                inside = list(self.parts(node.children, node.start_byte + 1, end, quoted=True))
                return inside or [WordPart("text", "", quoted=True)]
            case "raw_string" | "ansi_c_string":
                return [WordPart("text", text[:-1].removeprefix("$").removeprefix("'"), quoted=True)]
            case "simple_expansion":
                return [WordPart("variable", text[1:], quoted)]
            case "expansion":
                inside = text[2:-1]
                if not quoted:
                    inside = _HOME_BY_DEFAULT.sub(r"\1${HOME}", inside)
                return [WordPart("variable", inside, quoted)]
        if _is_arithmetic(node):
            return [WordPart("arithmetic", text[2:-1] if text.startswith("$[") else text[3:-2], quoted)]
        return [WordPart("command", text[1:-1] if text.startswith("`") else text[2:-1], quoted)]


def _joined(before: tuple[WordPart, ...], behind: tuple[WordPart, ...]) -> tuple[WordPart, ...]:
    """Joins parts of a word that the grammar read as two.

    It cuts `$A/$B/c` behind the second `$`, so that a variable's name begins the following text.
    """
    last = before[-1]
    first = behind[0]
    if {last.kind, first.kind} != {"text"} or last.quoted or first.quoted or not last.text.endswith("$"):
        return (*before, *behind)
    if (name := re.match(r"[A-Za-z_]\w*|[0-9@*#?]", first.text)) is None:
        return (*before, *behind)
    around = (
        replace(last, text=last.text[:-1]),
        WordPart("variable", name[0]),
        replace(first, text=first.text[name.end() :]),
    )
    return (*before[:-1], *(part for part in around if part.text), *behind[1:])


def _with_words(command: Command, words: tuple[Word, ...]) -> Command:
    """Adds words that stand behind a command's redirections. In a chain or pipe they belong to the last command."""
    match command:
        case Simple():
            return replace(command, words=command.words + words)
        case Chain(links=(*links, (operator, last))):
            return Chain((*links, (operator, _with_words(last, words))))
        case Pipe(commands=(*commands, last)):
            return replace(command, commands=(*commands, _with_words(last, words)))
    return command


def _walk(node: Node) -> Iterator[Node]:
    """Yields `node` and all nodes below it, in order, except those inside a calculation."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [] if node.type == "command_substitution" and _is_arithmetic(node) else reversed(node.children)


def _is_arithmetic(node: Node) -> bool:
    """Whether a node is a calculation.

    In `${x:-$((y * (z + 1)))}` the grammar reads it as a command, and may find errors in it.
    """
    text = node.text.strip()
    return node.type == "arithmetic_expansion" or (text.startswith(b"$((") and text.endswith(b"))"))


def _is_fault(node: Node) -> bool:
    reserved = node.type == "command_name" and node.text.decode(errors="replace") in _RESERVED
    return node.is_error or node.is_missing or reserved


def _outermost(nodes: Sequence[Node], types: Container[str]) -> Iterator[Node]:
    """Yields the nodes of these types at and below `nodes` that are inside no other of them."""
    for node in nodes:
        if node.type in types:
            yield node
        else:
            yield from _outermost(node.children, types)


def _plain_text(text: str) -> str:
    """Text outside quotes, where a backslash takes the meaning from any character; a continued line is no character."""
    return re.sub(r"\\(.)", lambda match: match[1].strip("\n"), text, flags=re.DOTALL)


def _quoted_text(text: str) -> str:
    """Returns text inside double quotes. A backslash is literal there, except before certain characters."""
    return re.sub(r'\\(["\\$`\n])', lambda match: match[1].strip("\n"), text)
