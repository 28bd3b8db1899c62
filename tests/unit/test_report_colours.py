"""Colours of the report: each pair is told apart by eyes with and without red-green deficiency, in light and dark.

Differences are CIEDE2000 (Sharma, Wu, Dalal 2005), deficiencies Machado, Oliveira, Fernandes 2009 at severity 1,
contrast that of WCAG 2.2.
"""

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

CSS = (Path(__file__).parents[2] / "mrl/tools/report/assets/page.css").read_text()
LIGHT, DARK = (re.search(rf"{begin}(.*?)\}}", CSS, re.S)[1] for begin in (r"^:root \{", r"dark\) \{\s*:root \{"))
EYES = {
    "usual": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
}
XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]])
WHITE = [0.95047, 1.0, 1.08883]
LEAST = 10.0  # CIEDE2000; about 2 is seen side by side


def colour(theme: str, name: str) -> np.ndarray:
    """Linear red, green and blue of a variable of the style sheet, 0 to 1."""
    digits = re.search(rf"--{name}: #([0-9a-f]+);", theme)[1]
    digits = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
    value = np.array([int(digits[at : at + 2], 16) for at in (0, 2, 4)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(linear: np.ndarray) -> np.ndarray:
    x = XYZ @ np.clip(linear, 0, 1) / WHITE
    f = np.where(x > 216 / 24389, np.cbrt(x), (24389 / 27 * x + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def difference(first: np.ndarray, second: np.ndarray) -> float:
    """CIEDE2000 of two colours in L*a*b*."""
    (l1, a1, b1), (l2, a2, b2) = first, second
    mean = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    g = 0.5 * (1 - np.sqrt(mean**7 / (mean**7 + 25.0**7)))
    c1, c2 = np.hypot((1 + g) * a1, b1), np.hypot((1 + g) * a2, b2)
    h1, h2 = (np.degrees(np.arctan2(b, (1 + g) * a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    hue = (h1 + turn / 2) % 360 if c1 * c2 else h1 + h2
    dl, dc, dh = l2 - l1, c2 - c1, 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn) / 2)
    light, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    t = 1 + sum(
        k * np.cos(np.radians(n * hue + shift))
        for k, n, shift in ((-0.17, 1, -30), (0.24, 2, 0), (0.32, 3, 6), (-0.2, 4, -63))
    )
    sl = 1 + 0.015 * (light - 50) ** 2 / np.sqrt(20 + (light - 50) ** 2)
    sc, sh = 1 + 0.045 * chroma, 1 + 0.015 * chroma * t
    rc = 2 * np.sqrt(chroma**7 / (chroma**7 + 25.0**7))
    rt = -np.sin(np.radians(60 * np.exp(-(((hue - 275) / 25) ** 2)))) * rc
    return float(np.sqrt((dl / sl) ** 2 + (dc / sc) ** 2 + (dh / sh) ** 2 + rt * dc / sc * dh / sh))


@pytest.mark.parametrize(  # rows of the table of Sharma, Wu and Dalal
    ("first", "second", "expected"),
    [
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, 2.5, 0), (61, -5, 29), 22.8977),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
        ((2.0776, 0.0795, -1.135), (0.9033, -0.0636, -0.5514), 0.9082),
    ],
)
def test_the_difference_is_that_of_the_papers_table(first, second, expected):
    assert difference(np.array(first), np.array(second)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_all_colours_of_curves_and_phases_are_told_apart(theme, eye):
    seen = [lab(np.array(EYES[eye]) @ colour(theme, f"k{number}")) for number in range(14)]
    assert min(difference(*pair) for pair in combinations(seen, 2)) >= LEAST


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_curves_have_the_contrast_of_wcag(theme):
    def contrast(name: str, ground: str) -> float:
        dark, light = sorted(float(XYZ[1] @ colour(theme, one)) for one in (name, ground))
        return (light + 0.05) / (dark + 0.05)

    for ground in ("paper", "card"):
        assert min(contrast(name, ground) for name in ("ink", "soft", "link")) >= 4.5
        assert min(contrast(name, ground) for name in (*(f"k{i}" for i in range(14)), "good", "warn", "bad")) >= 3
