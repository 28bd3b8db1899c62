"""A page as one HTML file, with style, script, plotting library and data inline. Nothing is fetched.

Only this module escapes text. A content security policy lists the two scripts and the two styles by their hashes. So
nothing else runs on the page, whatever a model wrote, and no request leaves it. A page that is served live may ask its
own server.
"""

import base64
import hashlib
import json
from dataclasses import asdict
from functools import cache
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import Any

import numpy as np

from mrl.errors import printable
from mrl.tools.report.columns import Curve
from mrl.tools.report.html_blocks import block_html, table_html
from mrl.tools.report.page import Chart, Explorer, Page, PageSection, Stack

UPLOT = "1.6.32"
BEGINS = "<!doctype html>"
POINTS = 200_000  # of all curves of a page together, 16 bytes each in the file


def page_html(page: Page, live: str = "") -> str:
    """Returns the file's text. With `live`, its tag, the page asks its server for newer versions."""
    styles = [_asset(f"uPlot-{UPLOT}.min.css"), _asset("page.css")]
    scripts = [_asset(f"uPlot-{UPLOT}.min.js"), _asset("page.js")]
    asks = "'none'"
    if live:
        asks = "'self'"
    policy = (
        f"default-src 'none'; style-src {_hashes(styles)}; script-src {_hashes(scripts)}; img-src data:; "
        f"connect-src {asks}; base-uri 'none'; form-action 'none'"
    )
    lines = "\n".join(
        [
            BEGINS,
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(page.title)}</title>",
            *(f"<style>{style}</style>" for style in styles),
            f'</head><body data-live="{escape(live)}">',
            *_body(page),
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>",
            "",
        ]
    )
    return printable(lines)


def _body(page: Page) -> list[str]:
    links = " ".join(f'<a href="#{escape(s.id)}">{escape(s.title)}</a>' for s in page.sections)
    return [
        f'<header><h1>{escape(page.title)}</h1><p class="sub">{escape(page.subtitle)}</p></header>',
        f'<nav>{links}<span id="live" role="status"></span></nav>',
        f'<main id="main">{_noscript(page)}',
        *map(_section, page.sections),
        f'<script type="application/json" id="data">{_data(page)}</script></main>',
    ]


def _section(section: PageSection) -> str:
    inside = ""
    for are_charts, blocks in groupby(section.blocks, lambda block: isinstance(block, Chart)):
        html = "".join(block_html(block) for block in blocks)
        if are_charts:
            html = f'<div class="charts">{html}</div>'
        inside += html
    return f'<section id="{escape(section.id)}"><h2>{escape(section.title)}</h2>{inside}</section>'


def _noscript(page: Page) -> str:
    if page.summary is None:
        return ""
    why = "<p>Curves need scripts, which this browser does not run. What they show, in numbers:</p>"
    return f"<noscript>{why}{table_html(page.summary)}</noscript>"


def _data(page: Page) -> str:
    """Returns the data for the script. It contains no `<`, which alone could end a script element."""
    blocks = [block for section in page.sections for block in section.blocks]
    most = max(2, POINTS // max(1, len(page.curves)))
    data: dict[str, Any] = {
        "curves": {
            name: _curve(curve if name in page.whole else curve.thinned(most)) for name, curve in page.curves.items()
        },
        "charts": [asdict(block) for block in blocks if isinstance(block, Chart)],
        "stacks": [asdict(block) for block in blocks if isinstance(block, Stack)],
        "explorers": [asdict(block) for block in blocks if isinstance(block, Explorer)],
    }
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _curve(curve: Curve) -> dict[str, Any]:
    return {"x": _base64(curve.steps.astype("<i4")), "y": _base64(curve.values.astype("<f8")), "of": curve.of}


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


@cache
def _asset(name: str) -> str:
    """Returns a file of the page as its element will contain it. The hash is of exactly this text."""
    text = (files("mrl.tools.report") / "assets" / name).read_text(encoding="utf-8")
    if "</script" in text or "</style" in text:
        raise ValueError(f"assets/{name} would end the element that it stands in")
    return text


def _hashes(texts: list[str]) -> str:
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii") for text in texts]
    return " ".join(f"'sha256-{digest}'" for digest in digests)
