"""Words and operators -> a tree of commands: the part of bash that launch scripts are written in. What it means is in shell.py."""

from collections.abc import Callable
from dataclasses import dataclass

from mrl.errors import ConfigError
from mrl.extras.import_verl.shell_lexer import REDIRECTS, Lexer, Part, Token, Word

_ENDS = ("then", "fi", "else", "elif", "do", "done", "esac", "}")
MAX_TEXT = 500_000  # characters of a script; real ones have a few thousand


@dataclass(frozen=True)
class Simple:
    words: tuple[Word, ...]
    line: int


@dataclass(frozen=True)
class Block:
    """Commands one after the other. `subshell`: what they set is gone afterwards."""

    commands: tuple["Command", ...]
    subshell: bool = False


@dataclass(frozen=True)
class Chain:
    """`a && b || c`: the operators stand before the commands they lead to, the first is ""."""

    links: tuple[tuple[str, "Command"], ...]


@dataclass(frozen=True)
class Pipe:
    commands: tuple["Command", ...]
    negated: bool = False


@dataclass(frozen=True)
class If:
    branches: tuple[tuple[Block, Block], ...]  # condition, what follows
    otherwise: Block


@dataclass(frozen=True)
class Case:
    word: Word
    branches: tuple[tuple[tuple[Word, ...], Block], ...]
    line: int


@dataclass(frozen=True)
class For:
    name: str
    words: tuple[Word, ...]
    body: Block
    line: int


@dataclass(frozen=True)
class While:
    condition: Block
    body: Block
    line: int
    until: bool = False


@dataclass(frozen=True)
class Function:
    name: str
    body: Block


Command = Simple | Block | Chain | Pipe | If | Case | For | While | Function


def parse_script(text: str, name: str) -> tuple[Block, list[int]]:
    """The commands of a script, and the lines of its here-documents, which are skipped. Raises ConfigError with the line."""
    if len(text) > MAX_TEXT:
        raise ConfigError(f"{name}: {len(text)} characters are no launch script (at most {MAX_TEXT})")
    lexer = Lexer(text, name)
    tokens = lexer.tokens()
    try:
        block = _Parser(tokens, name).whole()
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply") from None
    return block, lexer.here_documents


def parse_text(text: str, line: int, name: str) -> Word:
    """Text with expansions in it, as in `${x:-HERE}` or a quoted string: blanks are kept."""
    lexer = Lexer(text, name, line)
    return Word(tuple(lexer.parts(stop="")), line)


class _Parser:
    def __init__(self, tokens: list[Token], name: str) -> None:
        self.tokens, self.name, self.at = tokens, name, 0

    @property
    def now(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    @property
    def reserved(self) -> str | None:
        """The plain text of the word here, else None."""
        return self.now.word.plain if self.now is not None and self.now.word is not None else None

    def operator(self, *wanted: str) -> bool:
        return self.now is not None and self.now.word is None and self.now.operator in wanted

    def fail(self, problem: str) -> ConfigError:
        line = self.now.line if self.now is not None else self.tokens[-1].line
        return ConfigError(f"{self.name}:{line}: {problem}")

    def whole(self) -> Block:
        block = self.block()
        if self.now is not None:
            raise self.fail(f"{self.reserved or self.now.operator} without its beginning")
        return block

    def block(self) -> Block:
        """Commands up to a word or operator that ends a compound command, which is left."""
        commands = []
        while self.now is not None:
            if self.operator("\n", ";", "&"):
                self.at += 1
            elif self.reserved in _ENDS or self.operator(")", ";;", ";&", ";;&"):
                break
            else:
                commands.append(self.chain())
        return Block(tuple(commands))

    def chain(self) -> Command:
        links = [("", self.pipe())]
        while self.operator("&&", "||"):
            operator = self.now.operator
            self.at += 1
            self.skip_lines()
            links.append((operator, self.pipe()))
        return links[0][1] if len(links) == 1 else Chain(tuple(links))

    def pipe(self) -> Command:
        negated = self.reserved == "!"
        self.at += negated
        commands = [self.command()]
        while self.operator("|", "|&"):
            self.at += 1
            self.skip_lines()
            commands.append(self.command())
        return commands[0] if len(commands) == 1 and not negated else Pipe(tuple(commands), negated)

    def skip_lines(self) -> None:
        while self.operator("\n"):
            self.at += 1

    def command(self) -> Command:
        compound: dict[str, Callable[[], Command]] = {
            "if": self.if_, "case": self.case, "for": self.for_, "while": self.while_, "until": self.while_, "{": self.braces,
            "function": self.function,
        }  # fmt: skip
        if self.operator("("):
            return self.subshell()
        if self.reserved in compound:
            command = compound[self.reserved]()
            self.redirects()
            return command
        return self.simple()

    def expect(self, word: str) -> None:
        if self.reserved != word and not self.operator(word):
            raise self.fail(f"{word} is missing")
        self.at += 1

    def if_(self) -> If:
        branches, otherwise = [], Block(())
        while self.reserved in ("if", "elif"):
            self.at += 1
            condition = self.block()
            self.expect("then")
            branches.append((condition, self.block()))
        if self.reserved == "else":
            self.at += 1
            otherwise = self.block()
        self.expect("fi")
        return If(tuple(branches), otherwise)

    def case(self) -> Case:
        line = self.now.line
        self.at += 1
        word = self.word()
        self.skip_lines()
        self.expect("in")
        branches = []
        while True:
            self.skip_lines()
            if self.reserved == "esac":
                self.at += 1
                return Case(word, tuple(branches), line)
            branches.append(self.case_branch())

    def case_branch(self) -> tuple[tuple[Word, ...], Block]:
        self.at += self.operator("(")
        patterns = [self.word()]
        while self.operator("|"):
            self.at += 1
            patterns.append(self.word())
        self.expect(")")
        body = self.block()
        if self.operator(";;", ";&", ";;&"):
            self.at += 1
        return tuple(patterns), body

    def word(self) -> Word:
        if self.now is None or self.now.word is None:
            raise self.fail("a word is missing")
        self.at += 1
        return self.tokens[self.at - 1].word

    def for_(self) -> For:
        line = self.now.line
        self.at += 1
        if self.now is not None and self.now.word is not None and self.now.word.parts[0].kind == "arithmetic":
            raise self.fail("for ((...)) is not read; write the values out")
        name = self.word().plain or ""
        words: list[Word] = []
        if self.reserved == "in":
            self.at += 1
            while self.now is not None and self.now.word is not None:
                words.append(self.word())
        while self.operator("\n", ";"):
            self.at += 1
        return For(name, tuple(words), self.loop_body(), line)

    def while_(self) -> While:
        line, until = self.now.line, self.reserved == "until"
        self.at += 1
        condition = self.block()
        return While(condition, self.loop_body(), line, until)

    def loop_body(self) -> Block:
        self.expect("do")
        body = self.block()
        self.expect("done")
        return body

    def braces(self) -> Block:
        self.at += 1
        body = self.block()
        self.expect("}")
        return body

    def subshell(self) -> Block:
        self.at += 1
        body = self.block()
        self.expect(")")
        self.redirects()
        return Block(body.commands, subshell=True)

    def function(self) -> Function:
        self.at += self.reserved == "function"
        name = self.word().plain or ""
        if self.operator("("):
            self.at += 1
            self.expect(")")
        self.skip_lines()
        if self.reserved != "{":
            raise self.fail("a function's body is a { ... }")
        return Function(name, self.braces())

    def redirects(self) -> None:
        while self.operator(*REDIRECTS):
            self.at += 2

    def simple(self) -> Command:
        first = self.now
        following = self.tokens[self.at + 1 : self.at + 3]
        if first.word is not None and [t.operator for t in following] == ["(", ")"]:
            return self.function()
        words: list[Word] = []
        conditional = self.reserved == "[["
        while self.now is not None and (
            self.now.word is not None or self.operator(*REDIRECTS) or (conditional and not self.operator("\n"))
        ):
            if self.now.word is not None:
                words.append(self.word())
                conditional = conditional and words[-1].plain != "]]"
            elif conditional:
                words.append(Word((Part("text", self.now.operator),), self.now.line))
                self.at += 1
            else:
                self.redirects()
        if not words:
            raise self.fail(f"unexpected {first.operator!r}")
        return Simple(tuple(words), first.line)
