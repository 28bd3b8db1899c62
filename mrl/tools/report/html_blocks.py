"""Each block of a page as HTML. All text passes through `escape`."""

from html import escape

from mrl.tools.report import page
from mrl.tools.report.page import Bar, Block, Chart, Lanes, Pair, SampleBlock, Stack, Table, Token, color_of

SHADES = 5  # for each sign; classes t-5 .. t5 of page.css
TICKS = 4
# heights and widths of lanes in drawing units
_LANE = 22
_LABEL = 230
_WIDTH = 1000
_AXIS = 22


def block_html(block: Block) -> str:
    """Writes one block as HTML."""
    match block:
        case page.Paragraph(text, tone):
            if tone:
                return f'<p class="tone-{tone}">{escape(text)}</p>'
            return f"<p>{escape(text)}</p>"
        case page.Items(texts):
            return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"
        case page.Facts(rows):
            return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in rows)}</dl>"
        case Table():
            return table_html(block)
        case page.Text(text, caption):
            return f"<figure><figcaption>{escape(caption)}</figcaption><pre>{escape(text)}</pre></figure>"
        case Chart(note=note):
            return _chart(block, f'<p class="note">{escape(note)}</p>' if note else "")
        case Stack():
            return _chart(block, "", wide=True)
        case page.Explorer(id):
            return f'<figure class="chart wide" id="{escape(id)}"><figcaption>Any metric</figcaption></figure>'
        case Lanes():
            return _lanes(block)
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
    return (
        f'<figure class="lanes"><figcaption>{escape(lanes.title)}</figcaption>{_legend(lanes)}'
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


def _legend(lanes: Lanes) -> str:
    kinds = dict.fromkeys((bar.kind, bar.label) for _, bars in lanes.rows for bar in bars)
    signs = "".join(f'<span><i class="k{color_of(kind)}"></i>{escape(label)}</span>' for kind, label in kinds)
    return f'<p class="legend">{signs}</p>'


# ---------------------------------------------------------------- text that a model wrote


def _sample(sample: SampleBlock) -> str:
    tokens = "".join(_token(token, sample) for token in sample.tokens)
    facts = "".join(f"<span>{escape(name)} <b>{escape(value)}</b></span>" for name, value in sample.facts)
    return (
        f'<figure class="sample"><figcaption>{escape(sample.title)}</figcaption><p class="facts">{facts}</p>'
        f'<pre class="prompt">{escape(sample.prompt)}</pre><pre class="response">{tokens}</pre></figure>'
    )


def _token(token: Token, sample: SampleBlock) -> str:
    if token.value is None:
        return f"<span>{escape(token.text)}</span>"
    shade = round(max(-1.0, min(1.0, token.value / sample.scale)) * SHADES)
    return f'<span class="t{shade}" title="{escape(sample.meaning)} {token.value:.3g}">{escape(token.text)}</span>'


def _pair(pair: Pair) -> str:
    sides = "".join(
        f"<div><h4>{escape(head)}</h4><pre>{escape(text)}</pre></div>" for head, text in (pair.left, pair.right)
    )
    return (
        f'<figure class="sample"><figcaption>{escape(pair.title)}</figcaption><pre '
        f'class="prompt">{escape(pair.prompt)}</pre>'
        f'<div class="pair">{sides}</div></figure>'
    )
