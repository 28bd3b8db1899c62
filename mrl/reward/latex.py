"""Normalises short mathematical answers, and compares what can be compared exactly: numbers, units, lists.

Standard library only.
"""
# ruff: noqa: RUF001  the characters that look alike are what this file is about

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from mrl.reward.answers import closing_brace

LONGEST_NUMBER = 400  # characters
LARGEST_EXPONENT = 100  # power of ten, in scientific notation
UNIT = "§"  # marks a unit in a cleaned answer; removed from the input

# single characters and their meaning; any other non-ASCII character stays and equals only itself
_UNICODE = {
    **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},  # full-width forms
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63", "-"),
    **dict.fromkeys("\u00a0\u2009\u202f\u2002\u2003\u3000\u2005\u2006", " "),
    **dict.fromkeys("\u200b\ufeff\u2060§", ""),
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/", "π": r"\pi ",
    "∞": r"\infty ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "°": r"^\circ ",
    "√": r"\sqrt ",
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "⅕": r"\frac{1}{5}",
    "⅛": r"\frac{1}{8}",
    "θ": r"\theta ",
    "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ", "，": ",", "。": ".", "、": ",",
}  # fmt: skip
_TABLE = str.maketrans(_UNICODE)
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")

_UNITS = {
    "cm": "cm centimeter centimeters", "mm": "mm millimeter millimeters", "m": "m meter meters metre metres",
    "km": "km kilometer kilometers", "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard yards",
    "mi": "mi mile miles",
    "g": "g gram grams", "kg": "kg kilogram kilograms",
    "lb": "lb lbs pound pounds", "oz": "oz ounce ounces", "s": "s sec second seconds", "min": "min minute minutes",
    "h": "h hr hrs hour hours", "day": "day days", "week": "week weeks", "month": "month months", "year": "year years",
    "dollar": "dollar dollars usd", "cent": "cent cents", "deg": "deg degree degrees", "rad": "rad radian radians",
    "mph": "mph",
    "unit": "unit units",
    "L": "L liter liters litre litres", "%": "percent percentage pct", "元": "元", "万元": "万元", "亿元": "亿元",
}  # fmt: skip
UNIT_OF = {spelling: unit for unit, spellings in _UNITS.items() for spelling in spellings.split()}
# a single letter may be a variable
_BARE_UNITS = sorted((s for s in UNIT_OF if len(s) > 1 or s == "元"), key=len, reverse=True)
_KNOWN_UNIT = re.compile(rf"(?:{'|'.join(map(re.escape, _UNITS))})[23]?")
_POWER = r"(?:\s*\^\s*\{?([23])\}?)?"
_SQUARE = {"square": "2", "sq": "2", "cubic": "3"}
_TRAILING_UNIT = re.compile(
    rf"(?<=[0-9)}}\s])\s*(?:(square|sq|cubic)\.?\s+)?({'|'.join(map(re.escape, _BARE_UNITS))}){_POWER}$"
)
_TEXT_UNIT = re.compile(r"(?:(square|sq|cubic)\.?\s+)?([A-Za-z元万亿]+)" + _POWER + "$")
_TEXT = re.compile(
    r"\\(?:text(?:normal|bf|it|rm|sf|tt|sc|sl|up|md)?|math(?:rm|bf|it|sf|tt|normal)|[mh]box|operatorname\*?|emph|"
    r"boldsymbol|bm|pmb|underline|uline)\s*\{"
)

_SPACES = re.compile(r"(?<!\\)\\(?:[,;:! ]|quad(?![a-zA-Z])|qquad(?![a-zA-Z])|enspace(?![a-zA-Z]))|~")
_LEFT_OUT = re.compile(
    r"\\(?:left|right|(?:display|text|script)style|[bB]ig[lrm]?|[bB]igg[lrm]?|limits)(?![a-zA-Z])\.?|"
    r"\\(?:bf|it|rm|sf|tt|sc|sl|em|bfseries|itshape|boldmath|tiny|small|normalsize|large|Large|huge|Huge)(?![a-zA-Z])|"
    r"\\(?:text)?color\s*\{[^{}]*\}|"
    r"(?<!\\)\\[()\[\]]|\$"
)
# commas between thousands that are no commas of a list: 11,\!111 and 11{,}111
_THOUSANDS = re.compile(r"(?<=\d)(?:\{,\}\s*(?:\\!\s*)*|,\s*(?:\\!\s*)+)(?=\d{3}(?!\d))")
_TWICE = re.compile(r"\\\\(?=[A-Za-z]{2})")  # a command as JSON writes it
_DOTS = r"\ldots"
_ANY_DOTS = re.compile(r"\\(?:ldots|cdots|dots[cbmio]?|hdots)(?![a-zA-Z])|…|(?<!\.)\.\.\.(?!\.)")
_UNEQUAL = re.compile(r"\\neq?(?![a-zA-Z])|\\not\s*=|(?<=\s)!=")
_DOLLARS = re.compile(r"^\s*\$?\s*([+-]?)\s*\\\$([^§]*?)(\$?)$")
_FRACTION = re.compile(r"\\[dtc](frac|binom)(?![a-zA-Z])")
_BETWEEN = re.compile(r"\\(choose|over)(?![a-zA-Z])")
_TAKES_BRACES = re.compile(r"(?:[\^_}]|\\(?!cdot|times|div)[A-Za-z]+)\s*$")  # a power, an index, a command
_TIMES_BINOMIAL = re.compile(r"(?<=[\d)])\s*(?=\\binom\{)")
_BETWEEN_AS = {"choose": r"\binom", "over": r"\frac"}
_OF_TWO = re.compile(r"\\(?:frac|binom)(?![a-zA-Z])")
_TOKEN = re.compile(r"\\(?:pi|theta|alpha|beta|gamma|lambda|mu|phi|omega|rho|sigma|tau)(?![a-zA-Z])|[0-9A-Za-z]")
_BAR = re.compile(r"\\[lr]?vert(?![a-zA-Z])\s*")
_ALL_REAL = re.compile(r"((?:[a-z]\s*\\in\s*)?)(?:\\mathbb\s*(?:\{\s*R\s*\}|R)|ℝ)")
_EMPTY = re.compile(r"\\varnothing|\\\{\s*\\\}")
_SHORT_ROOT = re.compile(r"\\sqrt\s*(\d|[a-z])(?![a-zA-Z])")
_NO_COMMAND = re.compile(r"(?<![A-Za-z\\])(?:pi(?![A-Za-z])|(?:sqrt|exp|sin|cos|tan|log|ln)(?=\())")
_ROUND_ROOT = re.compile(r"\\sqrt\s*\(([^()]*)\)")
# base of a logarithm without braces: all its digits before a blank, bracket or letter; else one, as TeX has it
_BASE = re.compile(r"\\log\s*_\s*(?:(\d+|[a-z])(?=[\s({\\A-Za-z])|(\d))\s*", re.ASCII)
# an answer as programs print numbers: neither hexadecimal (1E2) nor times Euler's number (2e-1, 5e+12)
_PRINTED = re.compile(r"([+-]?)(?:(\d*\.\d+)[eE]([+-]?\d{1,3})|(1)e([+-]?\d{1,3})|(\d+)[eE]([+-]0\d))", re.ASCII)
_PLUS_NEGATIVE = re.compile(r"(?<=[\w)}])\s*\+\s*-\s*(?=[\w\\(.])")
_DEGREES = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])")

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d+)?|\.\d+)"
_PLAIN = re.compile(_DECIMAL, re.ASCII)
_BRACED = rf"\{{\s*([+-]?)\s*({_DECIMAL})\s*\}}"
_RATIO = re.compile(rf"\\frac{_BRACED}{_BRACED}|({_DECIMAL})\s*/\s*([+-]?)({_DECIMAL})", re.ASCII)
_MIXED = re.compile(r"(\d+)\s*\\frac\{\s*(\d+)\s*\}\{\s*(\d+)\s*\}|(\d+) (\d+)/(\d+)", re.ASCII)
_SCIENTIFIC = re.compile(rf"(?:({_DECIMAL})\s*\\(?:times|cdot)\s*)?10\s*\^\s*(?:\{{\s*([+-]?\d+)\s*\}}|(\d))", re.ASCII)

_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\s*(?:\{(\d+)\}|(\d))", re.ASCII)

_OPEN = "(["
_CLOSE = ")]"
_SEPARATOR = re.compile(r",|;|\s+(?:and|or)\s+")


@dataclass(frozen=True)
class Quantity:
    """An exact number and its unit."""

    value: Fraction
    unit: str = ""


def clean(text: str) -> str:
    """Returns the answer without formatting: no dollars, sizes, spacing commands, text wrappers and final period.

    Units are marked with `§`.
    """
    if r"\begin" not in text:  # where \\ ends a row
        text = _TWICE.sub(lambda m: "\\", text)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+", lambda m: "^{" + m[0].translate(_RAISED) + "}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda m: "_{" + m[0].translate(_LOWERED) + "}", text)
    text = _UNEQUAL.sub(lambda m: r"\ne ", _THOUSANDS.sub("", text.translate(_TABLE)))
    text = text.replace("{,}", ",").replace(r"\%", "%").replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}")
    text = (
        _DOLLARS.sub(lambda m: f"{m[1]}{m[2]} {UNIT}$$", text).replace(r"\$", "").replace(f"{UNIT}$$", f"{UNIT}dollar")
    )
    text = _ANY_DOTS.sub(lambda m: f"{_DOTS} ", text)
    text = _BAR.sub("|", _FRACTION.sub(lambda m: rf"\{m[1]}", text))
    text = _DEGREES.sub(f" {UNIT}deg", _LEFT_OUT.sub("", text))
    text = _unwrap_text(_SPACES.sub(" ", text.replace(r"\!", "")))
    text = _NO_COMMAND.sub(lambda m: rf"\{m[0]} ", text)
    text = _TIMES_BINOMIAL.sub(lambda m: r"\cdot ", _in_braces(_before_its_parts(text)))
    text = _SHORT_ROOT.sub(lambda m: rf"\sqrt{{{m[1]}}}", _ROUND_ROOT.sub(lambda m: rf"\sqrt{{{m[1]}}}", text))
    text = _BASE.sub(lambda m: rf"\log_{{{m[1] or m[2]}}} ", text)
    text = _PLUS_NEGATIVE.sub("-", re.sub(r"\s+", " ", text)).strip()
    text = text.removeprefix("=").lstrip()
    text = _without_braces(text[:-1].rstrip() if text.endswith(".") else text)
    if printed := _PRINTED.fullmatch(text):
        digits, exponent = filter(None, printed.groups()[1:])
        return rf"{printed[1]}{digits} \times 10^{{{int(exponent)}}}"
    if real := _ALL_REAL.fullmatch(text):
        return rf"{real[1]}(-\infty,\infty)"
    if _EMPTY.fullmatch(text):
        return r"\emptyset"
    return _TRAILING_UNIT.sub(lambda m: f" {UNIT}{_unit(*m.groups())}", text).replace(f" {UNIT}", UNIT)


def _without_braces(text: str) -> str:
    """Removes braces around the whole: they group, and are left of \\color{red}{5}."""
    while text.startswith("{") and closing_brace(text, 1) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def _before_its_parts(text: str) -> str:
    """Writes TeX's `{n \\choose k}` as `\\binom{n}{k}`, and `\\over` as `\\frac`; braces around bound the parts."""
    while match := _BETWEEN.search(text):
        start = match.start()
        depth = 0
        while start > 0 and (depth or text[start - 1] != "{"):
            start -= 1
            depth += (text[start] == "}") - (text[start] == "{")
        end = closing_brace(text, match.end())
        if (start == 0) != (end is None):
            return text
        end = len(text) if end is None else end
        top, bottom = text[start : match.start()].strip(), text[match.end() : end].strip()
        if _BETWEEN.search(re.sub(r"\{.*\}", "", bottom)):
            return text  # TeX refuses two in one group
        before, after = text[:start], text[end:]
        if match[1] == "choose" and before and not _TAKES_BRACES.search(before[:-1]):
            before, after = before[:-1], after[1:]  # the braces did no more
        text = f"{before}{_BETWEEN_AS[match[1]]}{{{top}}}{{{bottom}}}{after}"
    return text


def _in_braces(text: str) -> str:
    """Writes both parts of fractions and binomials in braces, inner ones first: `\\frac\\pi2` is `\\frac{\\pi}{2}`."""
    for match in reversed(list(_OF_TWO.finditer(text))):
        parts = ""
        end = match.end()
        for _ in range(2):
            while text[end : end + 1] == " ":
                end += 1
            closing = closing_brace(text, end + 1) if text[end : end + 1] == "{" else None
            token = _TOKEN.match(text, end)
            if closing is not None:
                parts += text[end : closing + 1]
                end = closing + 1
            elif token:
                parts += f"{{{token[0]}}}"
                end = token.end()
            else:
                break
        else:
            text = text[: match.end()] + parts + text[end:]
    return text


def _unwrap_text(text: str) -> str:
    """Replaces `\\text{...}` by its content between spaces, or by a marked unit if the content is one and something
    precedes.
    """
    while match := _TEXT.search(text):
        end = closing_brace(text, match.end())
        if end is None:
            return text
        content = text[match.end() : end]
        before = text[: match.start()]
        after = text[end + 1 :]
        raised = re.match(r"\s*\^\s*\{?([23])\}?", after)
        unit = _TEXT_UNIT.fullmatch(content.strip().rstrip(".") + (raised[0] if raised else ""))
        if unit and unit[2] in UNIT_OF and before.strip():
            text = f"{before} {UNIT}{_unit(*unit.groups())} {after[raised.end() if raised else 0 :]}"
        else:
            text = f"{before} {content} {after}"
    return text


def _unit(shape: str | None, name: str, power: str | None) -> str:
    return UNIT_OF[name] + (_SQUARE.get(shape or "") or power or "")


def quantity(text: str) -> Quantity | None:
    """Returns the exact number of a cleaned answer, with its unit; None for anything else."""
    if len(text) > LONGEST_NUMBER:
        return None
    body, unit = split_unit(text)
    if body.endswith("%"):
        body = body[:-1].rstrip()
        unit = unit or "%"
    value = _number(body.strip())
    if value is None:
        return None
    return Quantity(value, unit)


def split_unit(text: str) -> tuple[str, str]:
    """Returns (text before the unit, unit). A text that does not end with its unit has no unit."""
    body, marked, unit = text.partition(UNIT)
    if marked and _KNOWN_UNIT.fullmatch(unit.strip()):
        return (body.strip(), unit.strip())
    return (text, "")


def _number(text: str) -> Fraction | None:
    if text[:1] == "(" and text[-1:] == ")" and "," not in text:  # with a comma it is a pair
        text = text[1:-1].strip()
    sign = 1
    if text.startswith("-"):
        sign = -1
    text = text[1:].lstrip() if text[:1] in ("-", "+") else text
    if _PLAIN.fullmatch(text):
        return sign * _fraction(text)
    try:
        for pattern, value in _NUMBERS:
            if match := pattern.fullmatch(text):
                return sign * value(*match.groups())
    except (ZeroDivisionError, OverflowError):
        pass
    return None


def _fraction(digits: str) -> Fraction:
    return Fraction(re.sub("[, ]", "", digits))


def _ratio(sign_a: str, a: str, sign_b: str, b: str, c: str, sign_d: str, d: str) -> Fraction:
    above, below, signs = (a, b, sign_a + sign_b) if a else (c, d, sign_d)
    return (-1) ** signs.count("-") * _fraction(above) / _fraction(below)


def _mixed(*parts: str) -> Fraction:
    whole, above, below = parts[:3] if parts[0] else parts[3:]
    return int(whole) + Fraction(int(above), int(below))


def _scientific(digits: str | None, braced: str, plain: str) -> Fraction:
    exponent = int(braced or plain)
    if abs(exponent) > LARGEST_EXPONENT:
        raise OverflowError
    return _fraction(digits or "1") * Fraction(10) ** exponent


def _repeating(whole: str, before: str, braced: str | None, plain: str) -> Fraction:
    """0.1\\overline{6} is (16 - 1) / 90."""
    period = braced or plain
    once = Fraction(int(whole + before + period) - int(whole + before or "0"), 10 ** len(period) - 1)
    return once / 10 ** len(before)


_NUMBERS = ((_RATIO, _ratio), (_MIXED, _mixed), (_SCIENTIFIC, _scientific), (_REPEATING, _repeating))


def same_quantity(truth: Quantity, answer: Quantity) -> bool:
    """Tells whether two quantities have equal numbers, and not two different units.

    A percentage equals its value (50 % is 0.5). Its bare number counts too, because questions ask for "how many
    percent"; Math-Verify refuses it in a box and takes it bare. It does not count if the truth is a bare number below
    one, which is a share.
    """
    if truth.unit and answer.unit and truth.unit != answer.unit:
        return False
    if "%" in (truth.unit, answer.unit) and truth.unit != answer.unit:
        shares = [q.value / 100 if q.unit == "%" else q.value for q in (truth, answer)]
        return shares[0] == shares[1] or (truth.value == answer.value and (truth.unit == "%" or abs(truth.value) >= 1))
    return truth.value == answer.value


def split_top(text: str, separator: re.Pattern[str]) -> list[str]:
    """Splits `text` at separators outside of brackets."""
    parts = []
    begin = 0
    depths = list(_depths(text))
    for match in separator.finditer(text):
        if depths[match.start()] == 0 and match.start() >= begin:
            parts.append(text[begin : match.start()].strip())
            begin = match.end()
    return [*parts, text[begin:].strip()]


def deepest(text: str) -> int | None:
    """Returns the depth of nested brackets of any kind; None if they are not balanced."""
    depths = [*_depths(text), 0]
    balanced = min(depths) >= 0 and sum(c in "([{" for c in text) == sum(c in ")]}" for c in text)
    if balanced:
        return max(depths)
    return None


def _depths(text: str) -> Iterator[int]:
    depth = 0
    for char in text:
        depth -= char in ")]}"
        yield depth
        depth += char in "([{"


@dataclass(frozen=True)
class Collection:
    """Several answers in one.

    `kind` is the pair of brackets, `list` for none and for braces, `union` for joined intervals.
    """

    kind: str
    items: tuple[str, ...]

    @property
    def ordered(self) -> bool:
        """Tells whether the order of the items counts. It does where dots stand for the items that follow from it."""
        return self.kind not in ("list", "union") or _DOTS in self.items


_RELATION = re.compile(r"<=|>=|<|>|\\(?:[lg](?:e|eq|eqslant|t)|ne)(?![a-zA-Z])")
_ONE_NAME = re.compile(r"[A-Za-z]|\\(?!infty|pi)[a-z]+")
_ALTERNATIVE = re.compile(r"\s+or\s+|\\(?:lor|vee)(?![a-zA-Z])")


def as_interval(text: str) -> str | None:
    """Returns an inequality of one name as the interval that it allows; None for any other text.

    `x \\ge 2` is `[2,\\infty)`, `1 < x \\le 3` is `(1,3]`, `x < 1 or x > 3` is a union.
    """
    parts = split_top(text, _ALTERNATIVE)
    intervals = [_one_interval(part) for part in parts]
    if None in intervals or len(set(map(bounded_name, parts))) > 1:
        return None
    return r"\cup ".join(intervals)


def bounded_name(inequality: str) -> str | None:
    """Returns the first name that stands alone on a side of an inequality; None without one."""
    sides = split_top(inequality, _RELATION)
    return next((side for side in sides if _ONE_NAME.fullmatch(side)), None)


def _one_interval(text: str) -> str | None:
    sides = split_top(text, _RELATION)
    signs = _RELATION.findall(text)
    name = bounded_name(text)
    if not signs or len(sides) != len(signs) + 1 or name is None or not all(sides) or sides.count(name) != 1:
        return None
    if signs == [r"\ne"]:
        other = sides[1 - sides.index(name)]
        return rf"(-\infty,{other})\cup ({other},\infty)"
    if len({_is_less(sign) for sign in signs}) > 1 or r"\ne" in signs:
        return None
    if not _is_less(signs[0]):
        sides, signs = sides[::-1], signs[::-1]
    side = sides.index(name)
    if side > 1 or len(sides) - side > 2:
        return None
    low, opened = (sides[0], "(" if _is_strict(signs[0]) else "[") if side else (r"-\infty", "(")
    high, closed = (sides[-1], ")" if _is_strict(signs[-1]) else "]") if side < len(sides) - 1 else (r"\infty", ")")
    return f"{opened}{low},{high}{closed}"


def _is_less(sign: str) -> bool:
    return sign[0] == "<" or sign.startswith(r"\l")


def _is_strict(sign: str) -> bool:
    return sign in "<>" or sign.endswith("t")


def is_interval(text: str) -> bool:
    """Tells whether a text is one interval, or several that are joined. `(1, 2)` is none, since it may be a point."""
    whole = collection(text)
    if whole is None:
        return False
    if whole.kind == "union":
        return True
    ends = "[" in whole.kind or "]" in whole.kind or any(r"\infty" in item for item in whole.items)
    return len(whole.items) == 2 and whole.ordered and whole.kind[0] in _OPEN and ends


_MATRIX = re.compile(r"\\begin\s*\{([pbv]?matrix|array)\}((?:(?!\\begin|\\end).)*)\\end\s*\{\1\}", re.DOTALL)
_COLUMNS = re.compile(r"\s*\{[lcr| ]*\}")  # how an array sets them
_UNION = re.compile(r"\\cup(?![a-zA-Z])")
_PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])")


def _without_brackets(text: str) -> str:
    """Removes brackets around a matrix of elements, which has the same meaning with round and square ones or none."""
    inner = text[1:-1].strip()
    is_wrapped = text[:1] + text[-1:] in ("()", "[]") and inner.startswith(r"\begin")
    if is_wrapped and (found := _MATRIX.fullmatch(inner)) and found[1] != "vmatrix":
        return inner
    return text


def collection(text: str) -> Collection | None:
    """Splits a cleaned answer into its parts; None for a single one. `a \\pm b` is two values, a matrix its entries."""
    if matrix := _MATRIX.fullmatch(_without_brackets(text)):
        body = matrix[2]
        if matrix[1] == "array":
            body = _COLUMNS.sub("", body, 1)
        rows = [[entry.strip() for entry in row.split("&")] for row in body.split(r"\\") if row.strip()]
        kind = "matrix"
        if matrix[1] == "vmatrix":
            kind = "determinant"
        return Collection(f"{kind} {[len(row) for row in rows]}", tuple(cell for row in rows for cell in row))
    if len(parts := split_top(text, _UNION)) > 1:
        return Collection("union", tuple(parts))
    text = re.sub(r"^and |^or ", "", text)
    if len(parts := [p for p in split_top(text, _SEPARATOR) if p]) > 1:
        return Collection("list", tuple(parts))
    if len(_PLUS_MINUS.findall(text)) == 1:
        plus = _PLUS_MINUS.sub("+", text).lstrip("+ ")
        minus = _PLUS_MINUS.sub("-", text)
        return Collection("list", (plus.strip(), minus.strip()))
    return _bracketed(text)


def _bracketed(text: str) -> Collection | None:
    inner = None
    kind = ""
    if text.startswith(r"\{") and text.endswith(r"\}"):
        inner = text[2:-2]
        kind = "list"
    elif len(text) > 2 and text[0] in _OPEN and text[-1] in _CLOSE and all(d > 0 for d in list(_depths(text))[1:-1]):
        inner = text[1:-1]
        kind = text[0] + text[-1]
    if inner is None:
        return None
    parts = split_top(inner, _SEPARATOR)
    if kind != "list" and len(parts) < 2:
        return None
    return Collection(kind, tuple(parts))
