"""What a page consists of, without a word of HTML: sections of blocks, each block plain data. Text in blocks is text,
never markup.
"""

from dataclasses import dataclass, field

from mrl.tools.report.columns import Curve
from mrl.tools.report.verdict import Tone

KINDS = 10  # colours of bars and layers; classes k0 .. k9 of page.css
_KNOWN = (
    "gen", "update_actor", "reshard", "old_log_prob", "testing", "save_checkpoint", "switch", "ref", "adv", "outside",
    "kv_cache", "optimizer", "sync_staging", "engine_weights", "activations", "parameters", "gradients",
    "log_prob", "temporaries", "other",
)  # fmt: skip


def color_of(kind: str) -> int:
    """Colour of a phase or of a part of memory: the same on every page and in every drawing."""
    if kind in _KNOWN:
        return _KNOWN.index(kind) % KINDS
    return KINDS - 1


@dataclass(frozen=True)
class Paragraph:
    """A sentence or several. `tone` colours its edge."""

    text: str
    tone: Tone | None = None


@dataclass(frozen=True)
class Items:
    """A list of sentences."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """Names and values, a line each."""

    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table:
    """A table; columns of `numbers` stand to the right. `caption` may be empty; `folded`: only it is seen until it is
    clicked.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...] = ()
    caption: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Text:
    """Lines as they are, of a log or a command."""

    text: str
    caption: str = ""


@dataclass(frozen=True)
class Series:
    """A curve of a chart. `band`: keys of the curves of the lower and the upper end of an interval around it;
    `color`: its number, else by its place.
    """

    label: str
    curve: str
    band: tuple[str, str] | None = None
    color: int | None = None


@dataclass(frozen=True)
class Chart:
    """Curves over steps on one axis. `curve` of a series is a key of Page.curves."""

    id: str
    title: str
    unit: str
    series: tuple[Series, ...]
    log: bool = False
    note: str = ""


@dataclass(frozen=True)
class Stack:
    """Curves of the same steps on top of each other."""

    id: str
    title: str
    unit: str
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Explorer:
    """A chart of any metric that the reader chooses. `runs`: label, and what stands before a metric's name in its key
    of Page.curves.
    """

    id: str
    names: tuple[str, ...]
    runs: tuple[tuple[str, str], ...] = (("", ""),)


@dataclass(frozen=True)
class Bar:
    """A stretch of a lane, from `start` to `stop` in the unit of the lanes. `kind` chooses the colour."""

    label: str
    start: float
    stop: float
    kind: str


@dataclass(frozen=True)
class Lanes:
    """Bars in rows over one axis that ends at `end`; `mark` is a limit drawn across, such as what a device has."""

    title: str
    unit: str
    rows: tuple[tuple[str, tuple[Bar, ...]], ...]
    end: float
    note: str = ""


@dataclass(frozen=True)
class Token:
    """A piece of text as the model wrote it, and a number of it (None: nothing is known)."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class SampleBlock:
    """One response, its tokens coloured by their values, -`scale` to `scale`."""

    title: str
    facts: tuple[tuple[str, str], ...]
    prompt: str
    tokens: tuple[Token, ...]
    scale: float
    meaning: str  # of a token's value, for the reader who points at it


@dataclass(frozen=True)
class Pair:
    """Two texts side by side, before and after."""

    title: str
    prompt: str
    left: tuple[str, str]  # head, text
    right: tuple[str, str]


Block = Paragraph | Items | Facts | Table | Text | Chart | Stack | Explorer | Lanes | SampleBlock | Pair


@dataclass(frozen=True)
class PageSection:
    """A heading with blocks; `id` names it in links and to tests."""

    id: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Page:
    """A whole page. `curves`: every curve that a chart names, thinned where they are many but for those of `whole`.
    `summary`: what stands there for a browser without scripts. `headline`: what the page says first.
    """

    title: str
    subtitle: str
    sections: tuple[PageSection, ...]
    curves: dict[str, Curve] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    summary: Table | None = None
    headline: str = ""
