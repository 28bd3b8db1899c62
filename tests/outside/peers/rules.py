"""verl's own rules for gsm8k, DAPO and MATH, and Math-Verify, over drawn responses."""

import contextlib
import io
import random
from math import comb, gcd
from typing import Any

from math_verify import parse, verify
from verl.utils.reward_score import default_compute_score, gsm8k, math_dapo, math_reward

PEERS = ("verl", "math-verify")
SOURCES = (
    "openai/gsm8k", "math", "math_dapo", "math_dapo_reasoning", "aime2024", "aime_2025", "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "mine",
)  # fmt: skip
TRUTHS = (
    "34", "7", "0", "-12", "1,234", "1234", "3.5", r"\frac{1}{2}", r"\frac12", r"2\sqrt{3}", "x^2+1", "(1,2)", "A",
    r"\{1,2\}", "90^\\circ", "5 \\text{ cm}", "1/2", "0.5", "50\\%", "\\$18.50", "k = 3", "[INVALID]", "\\text{even}",
    "10\\,000", "a dog", "3{,}000", "\\sqrt3", "\\overline{AB}", "\\textbf{12}", ".5", "x=5", "12 dollars",
)  # fmt: skip
WRONG = ("35", "8", "-1", r"\frac{2}{3}", "x^2-1", "", "[INVALID]", "{", "}", "1.", "$", "12,", "--7", "no idea")
WORDS = ("so", "we", "get", "then", "the number is", "3 + 4 = 7", "and $x=2$", "hence", "$", "\n", "\n\n", "\\[", "\\]",
         "Answer", "answer", ":", "####", "\\boxed", "{", "}", "\\}", "1,000", "42.")  # fmt: skip


def cases() -> list[dict[str, Any]]:
    """Returns one case a drawn response and function: inputs and what the peer gave."""
    rng = random.Random(49)
    made = [_gsm8k(rng) for _ in range(1500)]
    made += [_math_dapo(rng) for _ in range(3500)]
    made += [_normalised(rng) for _ in range(1000)]
    made += [_math_reward(rng) for _ in range(2500)]
    made += [_by_source(rng) for _ in range(800)]
    made += [_math_verify(rng, kind) for kind in KINDS for _ in range(60)]
    return made


def _answer(rng: random.Random, truth: str) -> str:
    """Returns the truth, a spelling that is near to it, or another answer."""
    near = (
        truth, truth, truth, f"${truth}$", f" {truth} ", f"{truth}.", f"\\text{{{truth}}}", f"x = {truth}",
        f"{truth} units", f"\\boxed{{{truth}}}", f"\\dfrac{{{truth}}}{{1}}", truth.replace(",", ""), f"{truth}\\%",
        f"\\left({truth}\\right)", f"{truth}^\\circ", f"{truth}\\!", truth.replace("frac", "tfrac"), f"\\${truth}",
        f"an {truth}", f"0{truth}", f"{truth}.0", f"{{{truth}}}", f"{truth}\\text{{ cm}}",
    )  # fmt: skip
    return rng.choice((truth, truth, truth, rng.choice(near), rng.choice(near), rng.choice(WRONG), rng.choice(TRUTHS)))


def _filler(rng: random.Random, most: int) -> str:
    """Returns some words, and where a response may be cut a long run of one."""
    words = [rng.choice(WORDS[:8] if rng.random() < 0.8 else WORDS) for _ in range(rng.randint(0, min(most, 5)))]
    return " ".join([*words, *["so"] * (rng.randint(0, 5 * most) if most > 5 else 0)])


def _response(rng: random.Random, truth: str) -> str:
    """Returns a response that states answers in some forms: boxes, lines, both, several, nested, cut, none."""
    parts = [_filler(rng, 30)]
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 2, 3))):
        said = _answer(rng, truth)
        forms = (
            f"\\boxed{{{said}}}", f"\\boxed{{{said}}}", f"\\boxed{{{said}}}", f"${{\\boxed{{{said}}}}}$",
            f"\\boxed{{\\boxed{{{said}}}}}", f"\\boxed {said}", f"\\boxed {said}$", f"\\boxed {{{said}}}",
            f"\\fbox{{{said}}}", f"\\boxed{{{said}", f"\\boxed{{{said}}}}}", f"Answer: {said}\n", f"Answer: {said}",
            f"answer : {said}\n", f"Answer:\n{said}\n", f"**Answer**: {said}\n", f"**Answer:** {said}\n",
            f"Answer: ${said}$\n", f"Answer: \\boxed{{{said}}}\n", "Answer: [INVALID]\n", f"#### {said}",
            f"####{said}", f"#### ${said}", f"the answer is {said}.", said,
        )  # fmt: skip
        parts.append(rng.choice(forms))
        parts.append(_filler(rng, rng.choice((0, 0, 2, 12, 40))))
    return " ".join(parts)


def _gsm8k(rng: random.Random) -> dict[str, Any]:
    number = rng.choice(("34", "7", "0", "-12", "1234", "1,234", "3.5", "18.50", "1000000"))
    said = rng.choice((number, number, f"{number}.", f"{number},", f"${number}", f"{number}.00", "8", ".", "..", "1,2"))
    forms = (f"#### {said}", f"#### {said}\n", f"####{said}", f"The answer is {said}", f"#### {said} #### 5", "####")
    text = " ".join((_filler(rng, 20), rng.choice(forms), _filler(rng, rng.choice((0, 0, 3, 60)))))
    method = rng.choice(("strict", "strict", "flexible"))
    scores = rng.choice(((0.0, 1.0), (0.1, 1.0), (0.0, 2.0)))
    given = {"rule": "gsm8k", "text": text, "truth": number, "method": method, "scores": scores}
    answer = gsm8k.extract_solution(text, method)
    return {**given, "answer": answer, "gave": gsm8k.compute_score(text, number, method, *scores)}


def _math_dapo(rng: random.Random) -> dict[str, Any]:
    truth = rng.choice(TRUTHS)
    text = _response(rng, truth)
    strict = rng.random() < 0.2
    pause = None
    if rng.random() < 0.1:
        pause = sorted(rng.randint(0, 350) for _ in range(4))
    gave = math_dapo.compute_score(text, truth, strict, pause)
    return {"rule": "math_dapo", "text": text, "truth": truth, "strict": strict, "pause": pause, "gave": gave}


def _normalised(rng: random.Random) -> dict[str, Any]:
    text = " ".join(_answer(rng, rng.choice(TRUTHS)) for _ in range(rng.randint(1, 3)))
    return {"rule": "normalised", "text": text, "gave": math_dapo.normalize_final_answer(text)}


def _math_reward(rng: random.Random) -> dict[str, Any]:
    truth = rng.choice(TRUTHS)
    text = _response(rng, truth)
    with contextlib.redirect_stdout(io.StringIO()):
        gave = math_reward.compute_score(text, truth)
    return {"rule": "math_reward", "text": text, "truth": truth, "gave": gave}


def _by_source(rng: random.Random) -> dict[str, Any]:
    source = rng.choice(SOURCES)
    truth = rng.choice(TRUTHS)
    text = _response(rng, truth)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            gave = default_compute_score(source, text, truth)
    except NotImplementedError:
        gave = None
    return {"rule": "by_source", "source": source, "text": text, "truth": truth, "gave": gave}


def _math_verify(rng: random.Random, kind: str) -> dict[str, Any]:
    """Returns Math-Verify's verdict on an answer that is right or wrong by construction."""
    truth, answer, right = KINDS[kind](rng)
    sides = [parse(text, parsing_timeout=None) for text in (f"${truth}$", answer)]
    gave = bool(verify(*sides, timeout_seconds=None))
    return {"rule": "math_verify", "kind": kind, "text": answer, "truth": truth, "right": right, "gave": gave}


def _number(rng: random.Random, other: int | None = None) -> int:
    return rng.choice([n for n in range(2, 100) if n != other])


def _boxed(answer: str) -> str:
    return f"Therefore it is $\\boxed{{{answer}}}$."


def _fraction(rng: random.Random) -> tuple[str, str, bool]:
    above, below, times = (_number(rng) for _ in range(3))
    right = rng.random() < 0.5
    said = above if right else above + 1
    forms = (f"\\frac{{{said * times}}}{{{below * times}}}", f"\\dfrac{{{said}}}{{{below}}}", f"{said}/{below}")
    return f"\\frac{{{above}}}{{{below}}}", _boxed(rng.choice(forms)), right


def _tiny(rng: random.Random) -> tuple[str, str, bool]:
    base, power = rng.choice((2, 3, 5, 7)), rng.randint(45, 400)
    said = power + rng.choice((0, 0, 1, -1, 5))
    forms = (
        f"{base}^{{-{said}}}",
        f"\\frac{{1}}{{{base}^{{{said}}}}}",
        f"\\left(\\frac{{1}}{{{base}}}\\right)^{{{said}}}",
    )
    return f"\\frac{{1}}{{{base}^{{{power}}}}}", _boxed(rng.choice(forms)), said == power


def _near_one(rng: random.Random) -> tuple[str, str, bool]:
    above, power = rng.randint(2, 9), rng.randint(100, 300)
    said = power + rng.choice((0, 0, 1, -1))
    ratio = f"\\left(\\frac{{{above}}}{{{above + 1}}}\\right)"
    return f"1-{ratio}^{{{power}}}", _boxed(f"-{ratio}^{{{said}}}+1"), said == power


def _irrational(rng: random.Random) -> tuple[str, str, bool]:
    number, power = rng.choice(("\\pi", "\\sqrt{2}", "e")), rng.randint(30, 200)
    said = power + rng.choice((0, 0, 1, -1))
    return f"{number}+2^{{-{power}}}", _boxed(f"2^{{-{said}}}+{number}"), said == power


def _root(rng: random.Random) -> tuple[str, str, bool]:
    factor, under = rng.randint(2, 12), rng.choice((2, 3, 5, 6, 7, 10))
    said = factor * factor * under + rng.choice((0, 0, 1))
    forms = (f"\\sqrt{{{said}}}", f"\\sqrt({said})")
    return f"{factor}\\sqrt{{{under}}}", _boxed(rng.choice(forms)), said == factor * factor * under


def _thousands(rng: random.Random) -> tuple[str, str, bool]:
    value = rng.randint(1000, 10**10)
    said = value + rng.choice((0, 0, 0, 1000))
    separator = rng.choice((",", ",\\!", "{,}", ",\\! "))
    return str(value), _boxed(f"{said:,}".replace(",", separator)), said == value


def _font(rng: random.Random) -> tuple[str, str, bool]:
    value = _number(rng)
    said = rng.choice((value, value, _number(rng, value)))
    forms = ("\\mathbf{%d}", "\\text{%d}", "\\textbf{%d}", "\\mathrm{%d}", "\\displaystyle %d", "\\textnormal{%d}",
             "\\boldsymbol{%d}", "\\color{blue}{%d}", "\\bf %d", "\\emph{%d}")  # fmt: skip
    return str(value), _boxed(rng.choice(forms) % said), said == value


def _named(rng: random.Random) -> tuple[str, str, bool]:
    one = _number(rng)
    two = _number(rng, one)
    said = rng.choice(((one, two), (one, two), (two, one)))
    names = rng.choice(("(p,q)", "(x, y)", "(m,n)", "(A,B)"))
    return f"({one},{two})", _boxed(f"{names} = {said}"), said == (one, two)


def _inequality(rng: random.Random) -> tuple[str, str, bool]:
    low = _number(rng)
    strict, said_strict = rng.random() < 0.5, rng.random() < 0.5
    said = rng.choice((low, low, _number(rng, low)))
    truth = f"x > {low}" if strict else f"x \\geq {low}"
    right = (low, strict) == (said, said_strict)
    return truth, _boxed(f"{'(' if said_strict else '['}{said}, \\infty)"), right


def _rounded(rng: random.Random) -> tuple[str, str, bool]:
    below = rng.choice((3, 7, 9, 11, 13))
    above = rng.choice([n for n in range(2, 100) if gcd(n, below) == 1])
    return f"\\frac{{{above}}}{{{below}}}", _boxed(f"{above / below:.{rng.randint(6, 9)}f}"), False


def _stated(rng: random.Random) -> tuple[str, str, bool]:
    value = _number(rng)
    said = rng.choice((value, value, _number(rng, value)))
    forms = (
        "Final Answer: The final answer is $%d$. I hope it is correct.", "**Answer**: %d", "**Answer:** %d",
        "The answer is %d.", "The answer is:\n$$\n%d\n$$", "The answer is:\n\\[%d\\]", "The **answer** is %d.",
        "The answer is $%d$. I am sure.", "$\\boxed %d$", "### Final answer: %d", "The final answer is therefore $%d$.",
        "Answer: \\(%d\\)", "Thus the answer is **%d**.", "The answer is equal to $%d$",
    )  # fmt: skip
    return str(value), rng.choice(forms) % said, said == value


def _of_x(rng: random.Random) -> tuple[str, str, bool]:
    one, two = _number(rng), _number(rng)
    said = two + rng.choice((0, 0, 1))
    forms = (f"x^2+{one + said}x+{one * said}", f"(x+{said})(x+{one})", f"({one}+x) \\cdot (x+{said})")
    return f"(x+{one})(x+{two})", _boxed(rng.choice(forms)), said == two


def _percent(rng: random.Random) -> tuple[str, str, bool]:
    value = _number(rng)
    said = rng.choice((value, value, _number(rng, value)))
    return str(value), _boxed(f"{said}\\%"), said == value


def _product(rng: random.Random) -> tuple[str, str, bool]:
    a, b, c = rng.sample("npqrxz", 3)
    two = _number(rng)
    pairs = (
        (f"{a}{b}", f"{b}{a}", f"{a}+{b}"), (f"{two}{a}{b}{c}", f"{c}{a}\\cdot {two}{b}", f"{two}{a}+{b}{c}"),
        (f"{a}^2{b}", f"{b}{a}^2", f"{a}^{{2{b}}}"),
        (f"\\frac{{{a}{b}}}{{{two}}}", f"\\frac{{1}}{{{two}}}{b}{a}", f"{a}{b}"),
        (f"|{a}-{two}|", f"|{two}-{a}|", f"|{two}+{a}|"),
    )  # fmt: skip
    truth, equal, other = rng.choice(pairs)
    right = rng.random() < 0.6
    return truth, _boxed(equal if right else other), right


def _binomial(rng: random.Random) -> tuple[str, str, bool]:
    above = rng.randint(5, 40)
    below = rng.randint(2, above // 2)
    said = rng.choice((below, above - below, below - 1))
    truth = rng.choice((str(comb(above, below)), f"\\binom{{{above}}}{{{below}}}"))
    return truth, _boxed(f"\\binom{{{above}}}{{{said}}}"), said != below - 1


KINDS = {
    "fraction": _fraction, "tiny": _tiny, "near_one": _near_one, "irrational": _irrational, "root": _root,
    "thousands": _thousands, "font": _font, "named": _named, "inequality": _inequality, "rounded": _rounded,
    "stated": _stated, "of_x": _of_x, "percent": _percent, "product": _product, "binomial": _binomial,
}  # fmt: skip
