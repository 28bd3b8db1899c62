"""Decides whether an answer is right: first by exact comparison of numbers, lists and text, then with math-verify.

Exact comparison takes microseconds. The verifier is strict where a policy could be rewarded for less than the answer:
several different answers, a list instead of one answer, another unit, other ends of an interval, words around a number.
Decimals are exact: 0.333 is not 1/3. It uses no signal and no alarm. The only deadline is that of the scoring process
(mrl.reward.pool).
"""

import functools
import logging
import re
from collections.abc import Collection as Container
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mrl.reward.answers import answers, boxed, closing_brace, truth_text
from mrl.reward.latex import (
    UNIT,
    UNIT_OF,
    Collection,
    as_interval,
    bounded_name,
    clean,
    collection,
    deepest,
    is_interval,
    quantity,
    same_quantity,
    split_top,
    split_unit,
)

MATCH = "match"
WRONG = "wrong"
NO_ANSWER = "no_answer"
SEVERAL = "several_answers"
TOO_COMPLEX = "too_complex"

LONGEST = 500  # limit of characters; longer answers are only compared as text
LONGEST_EXPRESSION = 200  # limit of characters for math-verify
DEEPEST = 6  # nested brackets; the parser's time grows exponentially with them
MOST_ITEMS = 16
LARGEST_EXPONENT = 10_000  # product of all whole exponents of an expression
PRIMES = (11, 13, 17, 19, 23, 29, 31)  # numerators of the values at which expressions are compared
CLEARLY = 1e-6  # no error of 15 digits is as large, where FEWEST_DIGITS are computed with
FEWEST_DIGITS = 50  # with which a difference is computed; each digit that a power can hide adds one
MOST_DIGITS = 20_000
DIGITS_OF_A_BIT = 0.30103
LARGEST_SYMBOLIC_EXPONENT = 50  # for terms with letters

_NAME = r"(?:[A-Za-z]+|\\(?:alpha|beta|gamma|theta|lambda|mu|phi|omega|rho|sigma|angle\s*[A-Z]+))(?:_\{?\w+\}?)?'?"
_SEVERAL_NAMES = rf"\(\s*{_NAME}(?:,\s*{_NAME})*\s*\)"  # (p, q) = (3, 2)
_ASSIGNED = re.compile(rf"({_NAME}(?:{_SEVERAL_NAMES})?|{_SEVERAL_NAMES})\s*(?:=|\\in(?![a-zA-Z]))\s*")
_NUMBER_OF_NAME = re.compile(r"\s|_\d+|_\{\s*\d+\s*\}")  # spaces, and which of several of a name it is
_ENDS_OPEN = re.compile(r"[-+*/=<>(^]\s*$")  # text that an operand must follow
_EQUALS = re.compile(r"(?<![<>!\\])=")
_WORD = re.compile(r"(?<!\\)(?<![A-Za-z\\])[^\W\d_]{2,}|[^\x00-\x7f]")
# a run of letters that is a product of variables, and never one of these; `d` before a letter is a differential
_PRODUCT = re.compile(r"(?!\w*(\w)\w*\1)(?!\w*d\w)(?:[a-np-z]{2,3}|[b-df-hj-np-tv-z]{4})")
_PRODUCT_ALONE = re.compile(r"a[bcdkx-z]+|[b-df-hj-np-tv-xz]+|[b-df-hj-np-tv-z]*[xz][b-df-hj-np-tv-z]*|u[vw]+")
_NO_PRODUCT = frozenset(
    r"""act age air am an and any are arm art as ask at aye be bed best bet big bit by can cat day end far few fig get
    her his if in is it its lcm let ln man map max may me men met mid min my nay net per pm set she sin six sum tan
    tea ten the try us via war was way we win yes yet""".split()  # noqa: SIM905
)
_FUNCTIONS = re.compile("ln|log|sin|cos|tan|sec|csc|cot|exp|lim|max|min|gcd|lcm|det|dim|arg|deg|abs|mod")
_SPACED_DIGITS = re.compile(r"\d\s+[\d.]")
_WHOLE_DECIMAL = re.compile(r"(?<![\d.])(\d+)\.0+(?![\d.])")
_COMMAND = re.compile(r"\\[A-Za-z]+|\\.")
_KNOWN_COMMANDS = frozenset(
    rf"\{name}"
    for group in (
        "frac sqrt pi cdot times div infty circ le leq ge geq ne neq lt gt lfloor rfloor lceil rceil vert "
        "emptyset varnothing mathbb binom",
        "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp",
        "theta alpha beta gamma delta lambda mu phi omega sigma rho tau epsilon",
    )
    for name in group.split()
)
# a power of a power; the factorial of anything but a number below 100
_TOWER = re.compile(r"\}\s*\^|\)\s*\^[^()]*\)\s*\^|[^\d\s]\s*!|!\s*!")
_LARGE_FACTORIAL = re.compile(r"\d{3,}\s*!")
_OF_FACTORIALS = re.compile(r"(?:(?<!\d)\d{1,4}(?!\d)|[!+*/(){}\s-]|\\(?:frac|cdot|times)(?![a-zA-Z]))+")
_SMALL_BINOMIAL = re.compile(r"\\binom\{\s*\d{1,3}\s*\}\{\s*\d{1,3}\s*\}")


class TooComplex(Exception):
    """The answer must not be computed: it could take forever, or mean anything."""


def math(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns score 1 if the response's answer is right, else 0. Parts: `acc`, `verdict` (a constant above) and
    `pred`.

    The answer is the content of `\\boxed{}`, else the text after `Answer:` or `answer is`, after `</think>`. A truth
    that is a list of texts names alternatives. `pred` is the answer as compared. Raises ValueError for an empty truth.
    """
    truths = [_truth(t) for t in (ground_truth if isinstance(ground_truth, list) else [ground_truth])]
    if not truths:
        raise ValueError("ground_truth is an empty list")
    verdict, pred = judge(truths, solution_str)
    correct = float(verdict == MATCH)
    return {"score": correct, "acc": correct, "verdict": verdict, "pred": pred}


def judge(truths: list[str], response: str) -> tuple[str, str]:
    """Returns (verdict, answer in canonical form). `truths` are cleaned alternatives."""
    given = list({canonical(a): a for a in map(clean, answers(response))}.values())
    if not any(given):
        return NO_ANSWER, ""
    # several boxes form a list, which is right only if the truth is one
    answer = given[0] if len(given) == 1 else ", ".join(given)
    try:
        right = any(equal(truth, answer) for truth in truths)
    except TooComplex:
        return TOO_COMPLEX, answer[:LONGEST]
    verdict = MATCH if right else (WRONG if len(given) == 1 else SEVERAL)
    return verdict, canonical(answer)[:LONGEST]


def _truth(value: Any) -> str:
    text = truth_text(value)
    inside = boxed(text)
    cleaned = clean(inside[-1] if inside else text)
    if not cleaned:
        raise ValueError(f"ground_truth {value!r} has no content")
    return cleaned


def canonical(cleaned: str) -> str:
    """Returns the same text for all spellings of a number. Other answers just lose needless spaces.

    Majority votes count these texts.
    """
    named = _ASSIGNED.match(cleaned)
    if named and len(_EQUALS.findall(cleaned)) <= 1:
        cleaned = cleaned[named.end() :]
    number = quantity(cleaned)
    if number is None:
        if _has_word(cleaned) or _SPACED_DIGITS.search(cleaned):
            return " ".join(cleaned.split())
        return cleaned.replace(" ", "")
    return str(number.value) + (UNIT + number.unit if number.unit else "")


def equal(truth: str, answer: str) -> bool:
    """Tells whether two cleaned answers are equal. Not symmetric: `x = 5` answers 5. Raises TooComplex."""
    if _same_text(truth, answer):
        return True
    if max(len(truth), len(answer)) > LONGEST:
        return False
    known = quantity(truth)
    given = quantity(answer)
    if known is not None and given is not None:
        return same_quantity(known, given)
    wholes = None
    if known is None:
        wholes = collection(truth)
    parts = None
    if given is None:
        parts = collection(answer)
    if interval := _as_intervals(truth, answer):
        return equal(*interval)
    if wholes is not None and parts is not None:
        return _same_collection(wholes, parts)
    if ends := _worked_out(truth, answer):
        return all(equal(truth, end) for end in ends)
    if assigned := _without_names(truth, answer):
        return equal(*assigned)
    if wholes is not None or parts is not None:
        return _set_of_one(wholes, parts, truth, answer)
    return _same_expression(truth, answer)


def _same_text(truth: str, answer: str) -> bool:
    """Compares texts without spaces: words also without case, single letters also without brackets around them.

    `1 2` is not 12.
    """
    if _SPACED_DIGITS.search(truth) or _SPACED_DIGITS.search(answer):
        return _tight(truth) == _tight(answer)
    if _has_word(truth):
        return " ".join(truth.split()).casefold() == " ".join(answer.split()).casefold()
    return _bare(truth) == _bare(answer)


def _tight(text: str) -> str:
    return re.sub(r"\{(\w)\}", r"\1", text)


def _bare(text: str) -> str:
    text = _tight(text).replace(" ", "")
    if re.fullmatch(r"\([A-Za-z]\)", text):
        return text[1:-1]
    return text


def _same_collection(truth: Collection, answer: Collection) -> bool:
    if truth.kind != answer.kind or len(truth.items) != len(answer.items) or len(truth.items) > MOST_ITEMS:
        return False
    if truth.ordered or _leaves_out_names(truth, answer):
        return all(equal(t, a) for t, a in zip(truth.items, answer.items, strict=True))
    left = list(answer.items)
    for item in truth.items:
        index = next((i for i, other in enumerate(left) if equal(item, other)), None)
        if index is None:
            return False
        del left[index]
    return True


def _leaves_out_names(truth: Collection, answer: Collection) -> bool:
    """Tells whether the truth gives values to several names and the answer has values alone, as `1, 2` for `a=1, b=2`.

    Their order then says whose they are. Roots x_1 and x_2 are values of one name.
    """
    names = {_NUMBER_OF_NAME.sub("", named[1]) for named in map(_ASSIGNED.match, truth.items) if named}
    return len(names) > 1 and not any(map(_ASSIGNED.match, answer.items))


def _set_of_one(truth: Collection | None, answer: Collection | None, truth_text: str, answer_text: str) -> bool:
    """Braces around a single answer do not change it, but for the empty set. No other collection is a single answer."""
    single = truth or answer
    if single.kind != "list" or len(single.items) != 1 or single.items[0] == r"\emptyset":
        return False
    if truth:
        return equal(single.items[0], answer_text)
    return equal(truth_text, single.items[0])


def _as_intervals(truth: str, answer: str) -> tuple[str, str] | None:
    """Returns both sides as intervals where both are inequalities of one name, or one is and the other an interval."""
    known = as_interval(truth)
    given = as_interval(answer)
    if known is not None and given is not None and bounded_name(truth) == bounded_name(answer):
        return known, given
    if known is not None and given is None and collection(answer) is not None:
        return known, answer
    if given is not None and known is None and is_interval(truth):
        return truth, given
    return None


def _worked_out(truth: str, answer: str) -> list[str]:
    """Returns the values of an answer such as `n = 2+3 = 5`, each of which must be right; none of any other."""
    name, *values = split_top(answer, _EQUALS)
    if len(values) > 1 and "=" not in truth and re.fullmatch(_NAME, name):
        return values
    return []


def _without_names(truth: str, answer: str) -> tuple[str, str] | None:
    """Removes `x =`, `f(x) =` or `x \\in` if one side has it or both have the same. Returns both sides.

    Two chains of one name (`x = 1 + 1 = 2`) are as equal as their ends. Returns None if there is nothing to remove.
    """
    known = _ASSIGNED.match(truth)
    given = _ASSIGNED.match(answer)
    ends = [split_top(text, _EQUALS) for text in (truth, answer)]
    if known and given and known[1] == given[1] and len(ends[0]) == len(ends[1]) > 2:
        return ends[0][-1], ends[1][-1]
    known = known if known and len(_EQUALS.findall(truth)) <= 1 else None
    given = given if given and len(_EQUALS.findall(answer)) <= 1 else None
    if known and given:
        if known[1].replace(" ", "") == given[1].replace(" ", ""):
            return (truth[known.end() :], answer[given.end() :])
        return None
    if given and "=" not in truth:
        return truth, answer[given.end() :]
    if known and "=" not in answer:
        return truth[known.end() :], answer
    return None


def _same_expression(truth: str, answer: str) -> bool:
    """Compares as expressions, the last layer.

    Does not compute with words, units of one side only, or chains of equations. A decimal is the number it writes.
    """
    truth, unit = split_unit(truth)
    answer, own = split_unit(answer)
    if unit and own and unit != own:
        return False
    for text in (truth, answer):
        if not _is_expression(text, text is answer):
            return False
    letters = _letters(truth)
    if len({letter.lower() for letter in letters}) != len(letters):
        return False  # math-verify takes A for a
    if _letters(truth) != _letters(answer) or len(split_top(answer, _EQUALS)) != len(split_top(truth, _EQUALS)):
        return False
    for text in (truth, answer):
        _check_size(text)
    return _math_verify(*(_WHOLE_DECIMAL.sub(r"\1", text.strip()) for text in (truth, answer)))


def _letters(text: str) -> set[str]:
    """Returns the variables of an answer, without the constants e and i.

    Capital letters are different variables, although math-verify does not distinguish them.
    """
    return set(re.findall("[A-Za-z]", _COMMAND.sub(" ", text))) - {"e", "i"}


def _has_word(text: str, answer: bool = False) -> bool:
    """Tells whether letters in a row are a word, or the name of a segment, and no product of variables as in `2xy`.

    A truth of letters alone is a product only where hardly a word has such letters: `xy` and `ab`, but not `on`.
    """
    rest = _COMMAND.sub("*", text)
    runs = _WORD.findall(rest)
    if not all(
        _PRODUCT.fullmatch(run) and run not in _NO_PRODUCT and run not in UNIT_OF and not _FUNCTIONS.search(run)
        for run in runs
    ):
        return True
    if answer or not runs or re.search(r"[\d+\-=^/*<>]", rest):
        return False
    return len(re.findall("[A-Za-z]+", rest)) > 1 or not _PRODUCT_ALONE.fullmatch(runs[0])


def _has_odd_bars(text: str) -> bool:
    """Tells whether bars are anything but absolute values: a condition, as in `P(A|B)`, or bars of which nobody can say
    which two belong together, as in `|a|b|c|`.
    """
    parts = text.split("|")
    if len(parts) == 1:
        return False
    inside, outside = parts[1::2], parts[::2]
    if len(parts) % 2 == 0 or not all(part.strip() and deepest(part) is not None for part in inside):
        return True
    alone = len(parts) == 3 or (
        all(part.strip() and _ENDS_OPEN.search(part) for part in outside[1:-1])
        and not any(_ENDS_OPEN.search(part) for part in inside)
    )
    return not alone or bool(re.search("[A-Z]", text))


def _is_expression(text: str, answer: bool) -> bool:
    """Tells whether a text only has numbers, one-letter names, operators and known commands."""
    depth = deepest(text)
    if (
        depth is None
        or depth > DEEPEST
        or not text.strip()
        or any(command not in _KNOWN_COMMANDS for command in _COMMAND.findall(text))
    ):
        return False
    if r"\infty" in text and not re.fullmatch(r"\s*[+-]?\s*\\infty\s*", text):
        return False  # not a number to compute with
    rest = _COMMAND.sub("*", text)
    # leading zeros occur in dates, such as 2023-01-01
    odd = r"\d\s+[\d.]|\d\s*_|['\"`?@#&%:]|\.\.|\d\s*,\s*\d|(?<![\d.])0\d"
    return not (_has_word(text, answer) or _has_odd_bars(rest) or re.search(odd, rest))


def _check_size(text: str) -> None:
    """Raises TooComplex for long expressions, nested or huge powers, and factorials of anything but small numbers."""
    letters = re.search("[A-Za-df-z]", _COMMAND.sub(" ", text)) is not None  # e is a number
    if len(text) > LONGEST_EXPRESSION or _TOWER.search(text) or re.search(r"\d{41}", text):
        raise TooComplex
    if _LARGE_FACTORIAL.search(text) and not _OF_FACTORIALS.fullmatch(text):
        raise TooComplex
    product = 1
    for exponent in _exponents(text):
        if "^" in exponent or "!" in exponent:
            raise TooComplex
        for number in re.findall(r"\d+", exponent):
            product *= max(int(number), 1)
        if product > (LARGEST_SYMBOLIC_EXPONENT if letters else LARGEST_EXPONENT):
            raise TooComplex


def _exponents(text: str) -> Iterator[str]:
    """Yields what follows each `^`, its group or one character, and both parts of binomials that are not small."""
    for match in re.finditer(r"\^\s*", text):
        end = closing_brace(text, match.end() + 1) if text[match.end() : match.end() + 1] == "{" else match.end() + 1
        yield text[match.end() : end]
    rest = _SMALL_BINOMIAL.sub("", text)
    for match in re.finditer(r"\\binom\s*\{", rest):
        end = closing_brace(rest, match.end())
        yield rest[match.end() : closing_brace(rest, end + 2)]


def _math_verify(truth: str, answer: str) -> bool:
    """Compares with math-verify, for LaTeX only and without its alarms. An unreadable answer is wrong.

    Two numbers are compared without it, exactly.
    """
    parse, verify, targets = load_math_verify()
    sides = [parse(f"${text}$", targets, fallback_mode="no_fallback", parsing_timeout=None) for text in (truth, answer)]
    if not (sides[0] and sides[1]):
        return False
    known, given = sides[0][0], sides[1][0]
    if _is_number(known) and _is_number(given):
        return _confirmed(*_with_imaginary_unit(known, given))
    return bool(verify(*sides, timeout_seconds=None)) and _confirmed(known, given)


def _is_number(expression: Any) -> bool:
    """Tells whether a parsed expression has no variable. math-verify reads i as one."""
    from sympy import Expr

    return isinstance(expression, Expr) and {str(name) for name in expression.free_symbols} <= {"i"}


def _with_imaginary_unit(truth: Any, answer: Any) -> tuple[Any, Any]:
    """Reads i as the imaginary unit, unless the truth may mean an index: a + bi and powers of e are complex numbers,
    and i^2 + i, i! or |i| may be anything.
    """
    from sympy import Abs, I, exp

    units = truth.free_symbols | answer.free_symbols
    is_complex = truth.has(exp) or all(
        truth.is_polynomial(unit) and truth.as_poly(unit).degree() < 2 for unit in truth.free_symbols
    )
    if not units or not is_complex or truth.has(Abs) or answer.has(Abs):
        return truth, answer
    return tuple(side.subs(dict.fromkeys(units, I)) for side in (truth, answer))


def _confirmed(truth: Any, answer: Any) -> bool:
    """Tells whether what math-verify finds equal has equal numbers. Raises TooComplex.

    math-verify accepts a difference below some decimals, and one that it cannot evaluate: it finds 1/2^99 equal to
    1/2^98, and 7 pi^infinity equal to 5.
    """
    from sympy import Abs, Expr
    from sympy.core.relational import Relational

    if isinstance(truth, Expr) and isinstance(answer, Expr):
        point = _point({*truth.free_symbols, *answer.free_symbols}, PRIMES)
        sizes = (1, -1, 1000, -1000) if truth.has(Abs) or answer.has(Abs) else (1,)
        scaled = [{name: size * value for name, value in point.items()} for size in sizes]
        return all(_is_zero(_at(truth, at) - _at(answer, at), truth == answer) for at in scaled)
    if isinstance(truth, Relational) and isinstance(answer, Relational):
        return _same_relation(truth, answer)
    known = getattr(truth, "args", ())
    given = getattr(answer, "args", ())
    if type(truth) is not type(answer) or not known or len(known) != len(given):
        return bool(truth == answer)
    return all(_confirmed(*pair) for pair in zip(known, given, strict=True))


def _same_relation(truth: Any, answer: Any) -> bool:
    """Tells whether two relations are of one kind and what they compare with zero has one ratio everywhere.

    It is positive for inequalities: x > 1 is not -x > -1.
    """
    known, known_kind = _against_zero(truth)
    given, given_kind = _against_zero(answer)
    names = {*known.free_symbols, *given.free_symbols}
    if known_kind != given_kind:
        return False
    if not names:
        return _confirmed(truth.lhs, answer.lhs) and _confirmed(truth.rhs, answer.rhs)
    one, other = _point(names, PRIMES), _point(names, PRIMES[::-1])
    crossed = _at(known, one) * _at(given, other) - _at(known, other) * _at(given, one)
    if not _is_zero(crossed, truth == answer):
        return False
    turned = (_at(known, one) * _at(given, one)).evalf()
    return known_kind in ("==", "!=") or bool(turned.is_positive)


def _against_zero(relation: Any) -> tuple[Any, str]:
    """Returns what the relation compares with zero, and how: `==`, `!=`, `>` or `>=`."""
    if relation.rel_op in ("<", "<="):
        return relation.rhs - relation.lhs, relation.rel_op.replace("<", ">")
    return relation.lhs - relation.rhs, relation.rel_op


def _point(names: Container[Any], primes: Sequence[int]) -> dict[Any, Any]:
    """Returns a value for each variable."""
    from sympy import Rational

    in_order = sorted({str(name) for name in names})  # one name may be two symbols, of different assumptions
    values = {name: Rational(primes[i % len(primes)], 7 + i) for i, name in enumerate(in_order)}
    return {name: values[str(name)] for name in names}


def _at(expression: Any, point: Mapping[Any, Any]) -> Any:
    """Returns the value of an expression, exact where it is rational. Decimals are the numbers that are written."""
    from sympy import Float, Rational

    decimals = {number: Rational(str(number)) for number in expression.atoms(Float)}
    return expression.xreplace(decimals).subs(point).doit()


def _is_zero(number: Any, otherwise: bool) -> bool:
    """Tells whether an exact number is zero; `otherwise` where it has no finite value. Raises TooComplex.

    An irrational one is zero if it shows no value that more digits confirm, of as many as its powers can hide: what is
    left of zero is an error, which becomes smaller with each digit.
    """
    if number.is_Rational:
        return bool(number == 0)
    digits = FEWEST_DIGITS + _hidden_digits(number)
    if digits > MOST_DIGITS:
        raise TooComplex
    seen = []
    # few digits first, as they suffice for most; they round 1 + 10^-30 to 1, of which the logarithm is 0
    for wanted, most in ((15, digits), (digits, digits), (2 * digits, 2 * digits)):
        parts = number.evalf(wanted, maxn=most).as_real_imag()
        if not all(part.is_Float or part.is_Rational for part in parts):
            return otherwise
        if not seen and any(abs(part) > CLEARLY for part in parts):
            return False
        seen.append(parts)
    return not any(2 * abs(one - other) < abs(one) for one, other in zip(*seen[1:], strict=True))


def _hidden_digits(number: Any) -> int:
    """Returns how many digits may have to be computed before a part of a sum shows: 2^-99 needs 30, 1 - tanh(99) 86."""
    from sympy.functions.elementary.hyperbolic import HyperbolicFunction

    if number.is_Rational:
        return int((number.p.bit_length() + number.q.bit_length()) * DIGITS_OF_A_BIT) + 2
    base, exponent = number.as_base_exp()
    if exponent != 1 and exponent.is_number:
        power = abs(exponent.evalf(5))
        return (1 + int(power)) * (1 + _hidden_digits(base)) if power <= MOST_DIGITS else MOST_DIGITS + 1
    digits = 1 + sum(map(_hidden_digits, number.args))
    if isinstance(number, HyperbolicFunction) and number.args[0].is_number:
        power = 2 * abs(number.args[0].evalf(5))  # of e, in its exponentials
        digits += int(power) if power <= MOST_DIGITS else MOST_DIGITS
    return digits


@functools.cache
def load_math_verify() -> tuple[Any, Any, list[Any]]:
    """Returns math-verify's two functions and its settings for parsing an answer. The import takes about a second.

    Raises ImportError with the cure.
    """
    try:
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import parse, verify
        from math_verify.parser import LatexExtractionConfig
    except ImportError as error:
        raise ImportError("the rule `math` compares expressions with math-verify; pip install 'mrl[math]'") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit; the worker has one
    as_it_is = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="none", equations=False
    )
    targets = [LatexExtractionConfig(normalization_config=as_it_is)]
    verify(
        parse("$x+1$", targets, parsing_timeout=None),
        parse("$1+x$", targets, parsing_timeout=None),
        timeout_seconds=None,
    )  # loads tables
    return parse, verify, targets
