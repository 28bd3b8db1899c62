"""Shell text -> words and operators. Quotes and expansions are kept apart from plain text, since they mean different things later."""

import re
from dataclasses import dataclass
from typing import Literal

from mrl.errors import ConfigError

_OPERATORS = (";;&", "<<<", "<<-", "&>>", ";;", ";&", "&&", "||", "<<", ">>", "&>", ">&", "<&", "|&", ";", "&", "|", "<", ">", "(", ")")
REDIRECTS = frozenset(("<<<", "<<", "<<-", ">>", "&>", "&>>", ">&", "<&", "<", ">"))
_BLANK = " \t\r"
_AHEAD_OF_COMMANDS = ("if", "elif", "then", "else", "while", "until", "do", "for", "!", "{")
_DESCRIPTOR = re.compile(r"[0-9]+(?=[<>])")  # the number in `2>&1`


@dataclass(frozen=True)
class Part:
    """A piece of a word. `text` is the inside: of quotes, of ${...}, of $((...)), of $(...)."""

    kind: Literal["text", "variable", "arithmetic", "command", "array"]
    text: str
    quoted: bool = False
    words: tuple["Word", ...] = ()  # of an array


@dataclass(frozen=True)
class Word:
    parts: tuple[Part, ...]
    line: int

    @property
    def plain(self) -> str | None:
        """The text of a word without quotes and expansions, else None: reserved words are such."""
        one = len(self.parts) == 1 and self.parts[0].kind == "text" and not self.parts[0].quoted
        return self.parts[0].text if one else None


@dataclass(frozen=True)
class Token:
    operator: str  # "" for a word, "\n" for the end of a line
    word: Word | None
    line: int


class Lexer:
    """Reads a text once, from front to back; `line` is where it stands. `((...))` becomes a word of one arithmetic part."""

    def __init__(self, text: str, name: str, line: int = 1) -> None:
        self.text, self.name, self.at, self.line = text, name, 0, line
        self.here_documents: list[int] = []
        self.waiting: list[str] = []  # delimiters of here-documents that start at the next line

    def fail(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.name}:{self.line}: {problem}")

    def peek(self, length: int = 1) -> str:
        return self.text[self.at : self.at + length]

    def take(self, length: int = 1) -> str:
        piece = self.peek(length)
        self.at += length
        self.line += piece.count("\n")
        return piece

    def tokens(self) -> list[Token]:
        found: list[Token] = []
        while self.skip_blanks():
            found.append(self.token(found))
        return [*found, Token("\n", None, self.line)]

    def token(self, before: list[Token]) -> Token:
        line = self.line
        if self.peek() == "\n":
            self.take()
            self.skip_here_documents()
            return Token("\n", None, line)
        if descriptor := _DESCRIPTOR.match(self.text, self.at):
            self.take(len(descriptor.group()))
        if self.peek(2) == "((" and not (before and before[-1].word is not None and before[-1].word.plain not in _AHEAD_OF_COMMANDS):
            self.take(2)
            return Token("", Word((Part("arithmetic", self.balanced("(", ")", depth=2)[:-1]),), line), line)
        operator = next((o for o in _OPERATORS if self.peek(len(o)) == o), None)
        if operator is not None:
            self.take(len(operator))
            return Token(operator, None, line)
        word = Word(tuple(self.parts(stop=" \t\r\n;&|<>()")), line)
        if before and before[-1].operator in ("<<", "<<-"):
            self.waiting.append("".join(part.text for part in word.parts))
        return Token("", word, line)

    def skip_blanks(self) -> bool:
        """Past blanks, continued lines and comments; False at the end."""
        while self.at < len(self.text):
            if self.peek() in _BLANK:
                self.take()
            elif self.peek(2) == "\\\n" or self.peek(3) == "\\\r\n":
                self.take(2 + (self.peek(2) != "\\\n"))
            elif self.peek() == "#":
                while self.at < len(self.text) and self.peek() != "\n":
                    self.take()
            else:
                return True
        return False

    def skip_here_documents(self) -> None:
        for delimiter in self.waiting:
            self.here_documents.append(self.line)
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                row = self.take((end if end >= 0 else len(self.text)) - self.at + 1)
                if row.strip() == delimiter:
                    break
        self.waiting = []

    def parts(self, stop: str) -> list[Part]:
        """Parts of one word up to a character of `stop`; with an empty `stop`, of all the text, blanks included."""
        found: list[Part] = []
        text = ""
        while self.at < len(self.text) and (not stop or self.peek() not in stop or (self.peek() == "(" and text.endswith("="))):
            special = self.special(text, stop)
            if special is None:
                text += self.literal()
                continue
            if text:
                found.append(Part("text", text))
            text = ""
            found += special
        if text or not found:
            found.append(Part("text", text))
        return found

    def literal(self) -> str:
        if self.peek(2) == "\\\n":
            self.take(2)
            return ""
        if self.peek() == "\\" and self.at + 1 < len(self.text):
            self.take()
        return self.take()

    def special(self, before: str, stop: str) -> list[Part] | None:
        """What starts here and is no plain text; None where nothing does. `before`: plain text of the word so far."""
        match self.peek():
            case "'":
                self.take()
                return [Part("text", self.until("'"), quoted=True)]
            case '"':
                self.take()
                return self.double_quoted()
            case "$":
                return self.expansion(quoted=False)
            case "`":
                self.take()
                return [Part("command", self.until("`"))]
            case "(" if stop and before.endswith("="):
                return [Part("array", "", words=tuple(self.array()))]
        return None

    def until(self, end: str) -> str:
        stop = self.text.find(end, self.at)
        if stop < 0:
            raise self.fail(f"no closing {end}")
        return self.take(stop - self.at + 1)[:-1]

    def double_quoted(self) -> list[Part]:
        found, text = [], ""
        while self.peek() != '"':
            if self.at >= len(self.text):
                raise self.fail('no closing "')
            if self.peek(2) in ("\\\\", '\\"', "\\$", "\\`"):
                text += self.take(2)[1]
            elif self.peek(2) == "\\\n":
                self.take(2)
            elif self.peek() in "$`" and (expanded := self.quoted_expansion()) is not None:
                found += [*([Part("text", text, quoted=True)] if text else []), *expanded]
                text = ""
            else:
                text += self.take()
        self.take()
        return [*found, *([Part("text", text, quoted=True)] if text or not found else [])]

    def quoted_expansion(self) -> list[Part] | None:
        if self.peek() == "$":
            return self.expansion(quoted=True)
        self.take()
        return [Part("command", self.until("`"), quoted=True)]

    def expansion(self, quoted: bool) -> list[Part] | None:
        if self.peek(2) == "$'" and not quoted:
            self.take(2)
            return [Part("text", self.until("'"), quoted=True)]
        if self.peek(3) == "$((":
            self.take(3)
            inside = self.balanced("(", ")", depth=2)
            return [Part("arithmetic", inside[:-1], quoted)]
        if self.peek(2) == "$(":
            self.take(2)
            return [Part("command", self.balanced("(", ")"), quoted)]
        if self.peek(2) == "${":
            self.take(2)
            return [Part("variable", self.balanced("{", "}"), quoted)]
        name = self.text[self.at + 1 : self.at + 2]
        if name in tuple("@*#?$!") or name.isdigit():
            self.take(2)
            return [Part("variable", name, quoted)]
        if not (name.isalpha() or name == "_"):
            return None
        self.take()
        name = ""
        while self.peek().isalnum() or self.peek() == "_":
            name += self.take()
        return [Part("variable", name, quoted)]

    def balanced(self, opening: str, closing: str, depth: int = 1) -> str:
        """The text up to the bracket that closes `depth` open ones, without that bracket; quotes inside are respected."""
        start = self.at
        while depth:
            char = self.take()
            if not char:
                raise self.fail(f"no closing {closing}")
            if char == "\\":
                self.take()
            elif char in "'\"" and not (char == "'" and opening == "{"):
                self.skip_quoted(char)
            depth += (char == opening) - (char == closing)
        return self.text[start : self.at - 1]

    def skip_quoted(self, quote: str) -> None:
        while (char := self.take()) != quote:
            if not char:
                raise self.fail(f"no closing {quote}")
            if char == "\\" and quote == '"':
                self.take()

    def array(self) -> list[Word]:
        self.take()
        words = []
        while self.skip_blanks():
            if self.peek() == ")":
                self.take()
                return words
            if self.peek() == "\n":
                self.take()
                continue
            before = self.at
            words.append(Word(tuple(self.parts(stop=" \t\r\n)")), self.line))
            if self.at == before:
                break
        raise self.fail("no closing ) of an array")
