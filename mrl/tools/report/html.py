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
from mrl.tools.report.page import (
    Bar,
    Block,
    Chart,
    Explorer,
    Facts,
    Items,
    Lanes,
    Page,
    PageSection,
    Pair,
    Paragraph,
    ResponsePart,
    ResponseTable,
    SampleBlock,
    Stack,
    Table,
    Text,
    Token,
    color_of,
)

UPLOT = "1.6.32"
BEGINS = "<!doctype html>"
POINTS = 200_000  # of all curves of a page together, 16 bytes each in the file
SHADES = 5  # for each sign; classes t-5 .. t5 of page.css
TICKS = 4
# heights and widths of lanes in drawing units
_LANE = 22
_LABEL = 230
_WIDTH = 1000
_AXIS = 22


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
        f'<header><h1>{escape(page.title)}</h1><p class="sub">{escape(page.subtitle)}</p>{_card(page)}</header>',
        f'<nav>{links}<span id="live" role="status"></span></nav>',
        f'<main id="main">{_noscript(page)}',
        *map(_section, page.sections),
        f'<script type="application/json" id="data">{_data(page)}</script></main>',
    ]


def _card(page: Page) -> str:
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in page.card)
    return f'<dl class="card">{facts}</dl>' if facts else ""


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
        "rollouts": [
            [*asdict(row).values()] for block in blocks if isinstance(block, ResponseTable) for row in block.rows
        ],
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
        raise ValueError(f"assets/{name} would end its own element")
    return text


def _hashes(texts: list[str]) -> str:
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii") for text in texts]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def block_html(block: Block) -> str:
    """Writes one block as HTML."""
    match block:
        case Paragraph(text, tone):
            if tone:
                return f'<p class="tone-{tone}">{escape(text)}</p>'
            return f"<p>{escape(text)}</p>"
        case Items(texts):
            return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"
        case Facts(rows):
            return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in rows)}</dl>"
        case Table():
            return table_html(block)
        case Text(text, caption):
            return f"<figure><figcaption>{escape(caption)}</figcaption><pre>{escape(text)}</pre></figure>"
        case Chart(note=note):
            return _chart(block, f'<p class="note">{escape(note)}</p>' if note else "")
        case Stack():
            return _chart(block, "", wide=True)
        case Explorer(id):
            return f'<figure class="chart wide" id="{escape(id)}"><figcaption>Any metric</figcaption></figure>'
        case Lanes():
            return _lanes(block)
        case ResponseTable():
            return _rollouts(block)
        case SampleBlock():
            return _sample(block)
        case Pair():
            return _pair(block)


def table_html(table: Table) -> str:
    """Writes a table in a scrolling box, folded under its caption if requested."""
    caption = ""
    if table.caption and not table.folded:
        caption = f"<caption>{escape(table.caption)}</caption>"
    body = "".join(f"<tr>{_cells(table, row, 'td')}</tr>" for row in table.rows)
    whole = f"<table>{caption}<thead><tr>{_cells(table, table.head, 'th')}</tr></thead><tbody>{body}</tbody></table>"
    box = f'<div class="scroll">{whole}</div>'
    if table.folded:
        return f"<details><summary>{escape(table.caption)}</summary>{box}</details>"
    return box


def _cells(table: Table, row: tuple[str, ...], tag: str) -> str:
    return "".join(
        f"<{tag}{' class=n' if i in table.numbers else ''}>{escape(text)}</{tag}>" for i, text in enumerate(row)
    )


def _chart(block: Chart | Stack, note: str, wide: bool = False) -> str:
    """Writes an element in which the script draws."""
    unit = ""
    if block.unit:
        unit = f' <span class="unit">{escape(block.unit)}</span>'
    kind = "chart"
    if wide:
        kind = "chart wide"
    return (
        f'<figure class="{kind}" '
        f'id="{escape(block.id)}"><figcaption>{escape(block.title)}{unit}</figcaption>{note}</figure>'
    )


# ---------------------------------------------------------------- lanes, drawn here, as they need no script


def _lanes(lanes: Lanes) -> str:
    width = _WIDTH - _LABEL - 10
    end = lanes.end or 1.0
    height = _LANE * len(lanes.rows) + _AXIS
    parts = [_tick(tick / TICKS, width, height, f"{end * tick / TICKS:.3g} {lanes.unit}") for tick in range(TICKS + 1)]
    for number, (label, bars) in enumerate(lanes.rows):
        top = number * _LANE
        parts.append(f'<text x="0" y="{top + 15}">{escape(label)}</text>')
        parts += [_bar(bar, top, width / end, lanes.unit) for bar in bars]
    note = ""
    if lanes.note:
        note = f'<p class="note">{escape(lanes.note)}</p>'
    kinds = dict.fromkeys((bar.kind, bar.label) for _, bars in lanes.rows for bar in bars)
    signs = "".join(f'<span><i class="k{color_of(kind)}"></i>{escape(label)}</span>' for kind, label in kinds)
    legend = f'<p class="legend">{signs}</p>'
    return (
        f'<figure class="lanes"><figcaption>{escape(lanes.title)}</figcaption>{legend}'
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{escape(lanes.title)}">{"".join(parts)}</svg>{note}</figure>'
    )


def _tick(share: float, width: int, height: int, label: str) -> str:
    x = _LABEL + width * share
    anchor = {0.0: "start", 1.0: "end"}.get(share, "middle")
    line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - _AXIS + 4}"/>'
    return f'{line}<text class="axis" text-anchor="{anchor}" x="{x:.1f}" y="{height - 4}">{escape(label)}</text>'


def _bar(bar: Bar, top: int, scale: float, unit: str) -> str:
    x = _LABEL + bar.start * scale
    width = max((bar.stop - bar.start) * scale, 0.5)
    where = f'x="{x:.2f}" y="{top + 2}" width="{width:.2f}" height="{_LANE - 5}"'
    title = escape(f"{bar.label}: {bar.stop - bar.start:.3g} {unit}")
    return f'<rect class="k{color_of(bar.kind)}" {where}><title>{title}</title></rect>'


# ---------------------------------------------------------------- text that a model wrote


def _sample(sample: SampleBlock) -> str:
    response = "".join(_part(part, sample) for part in sample.parts)
    facts = "".join(f"<span>{escape(name)} <b>{escape(value)}</b></span>" for name, value in sample.facts)
    images = "".join(f'<img src="{escape(uri)}" alt="image {number}">' for number, uri in enumerate(sample.images, 1))
    return (
        f'<figure class="sample"><figcaption>{escape(sample.title)}</figcaption><p class="facts">{facts}</p>{images}'
        f'<pre class="prompt">{escape(sample.prompt)}</pre><pre class="response">{response}</pre></figure>'
    )


def _part(part: ResponsePart, sample: SampleBlock) -> str:
    head = ""
    if part.head:
        head = f"<b>{escape(part.head)}</b>"
    return head + "".join(_token(token, sample) for token in part.tokens)


def _token(token: Token, sample: SampleBlock) -> str:
    if token.is_context:
        return f'<span class="context" title="read, not sampled">{escape(token.text)}</span>'
    if token.value is None:
        return f"<span>{escape(token.text)}</span>"
    shade = round(max(-1.0, min(1.0, token.value / sample.scale)) * SHADES)
    return f'<span class="t{shade}" title="{escape(sample.meaning)} {token.value:.3g}">{escape(token.text)}</span>'


def _rollouts(table: ResponseTable) -> str:
    """Writes an element that the script fills with a table, and links to further pages."""
    links = " ".join(f'<a href="{escape(address)}">{escape(label)}</a>' for label, address in table.links)
    more = f'<p class="note">More steps, a page each: {links}</p>' if links else ""
    return (
        '<figure class="rollouts" id="rollouts"><figcaption>All stored responses</figcaption>'
        f"<noscript><p>The table needs scripts; mrl samples prints the same.</p></noscript></figure>{more}"
    )


def _pair(pair: Pair) -> str:
    sides = "".join(
        f"<div><h3>{escape(head)}</h3><pre>{escape(text)}</pre></div>" for head, text in (pair.left, pair.right)
    )
    return (
        f'<figure class="sample"><figcaption>{escape(pair.title)}</figcaption><pre '
        f'class="prompt">{escape(pair.prompt)}</pre>'
        f'<div class="pair">{sides}</div></figure>'
    )
