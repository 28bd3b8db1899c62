"""The content of a page, without HTML: sections of blocks, each block plain data.

Text in blocks is text, never markup.
"""

from dataclasses import dataclass, field

from mrl.tools.report.columns import Curve
from mrl.tools.report.verdict import Tone

# the place of each is its colour: classes k0 .. k13 of page.css
_PHASES = (
    "gen", "update_actor", "reshard", "old_log_prob", "testing", "save_checkpoint", "switch", "ref", "adv", "outside",
    "teacher", "values", "update_critic", "reward",
)  # fmt: skip
_TERMS = (
    "kv_cache", "optimizer", "sync_staging", "engine_weights", "activations", "parameters", "gradients",
    "log_prob", "temporaries", "other", "teacher", "reference", "critic", "engine_working_set",
)  # fmt: skip


def color_of(kind: str) -> int:
    """Returns the colour of a phase or of a part of memory, which is the same on all pages."""
    for known in (_PHASES, _TERMS):
        if kind in known:
            return known.index(kind)
    return _PHASES.index("outside")


@dataclass(frozen=True)
class Paragraph:
    """One or several sentences. `tone` colours the edge."""

    text: str
    tone: Tone | None = None


@dataclass(frozen=True)
class Items:
    """A list of sentences."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """Names and values, one on each line."""

    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table:
    """A table. Columns in `numbers` are right-aligned. `caption` may be empty. With `folded`, only the caption is
    visible until it is clicked.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...] = ()
    caption: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Text:
    """Unchanged lines of a log or a command."""

    text: str
    caption: str = ""


@dataclass(frozen=True)
class Series:
    """A curve of a chart. `label`: in words; pointing at it shows the name of `curve`. `band`: keys of the lower
    and upper curves of an interval around it. `color`: its number, by default its position.
    """

    label: str
    curve: str
    band: tuple[str, str] | None = None
    color: int | None = None


@dataclass(frozen=True)
class Chart:
    """Curves over steps with one axis. `curve` of a series is a key of Page.curves."""

    id: str
    title: str
    unit: str
    series: tuple[Series, ...]
    log: bool = False
    note: str = ""


@dataclass(frozen=True)
class Stack:
    """Stacked curves of the same steps."""

    id: str
    title: str
    unit: str
    series: tuple[Series, ...]


@dataclass(frozen=True)
class Explorer:
    """A chart of any metric that the reader chooses. `runs`: label, and prefix of a metric's name in its key of
    Page.curves.
    """

    id: str
    names: tuple[str, ...]
    runs: tuple[tuple[str, str], ...] = (("", ""),)
    first: str = ""  # the metric that is shown until another is chosen; "": the first of `names`


@dataclass(frozen=True)
class Bar:
    """A segment of a lane from `start` to `stop` in the unit of the lanes. `kind` chooses the colour."""

    label: str
    start: float
    stop: float
    kind: str


@dataclass(frozen=True)
class Lanes:
    """Rows of bars over one axis that ends at `end`. `mark` is a limit drawn across, such as a device's memory."""

    title: str
    unit: str
    rows: tuple[tuple[str, tuple[Bar, ...]], ...]
    end: float
    note: str = ""


@dataclass(frozen=True)
class Token:
    """A piece of text as the model wrote it or read it, and its number (None: unknown)."""

    text: str
    value: float | None = None
    is_context: bool = False  # read, not sampled


@dataclass(frozen=True)
class ResponsePart:
    """Tokens of a response under a head, such as those of one turn. A response of one turn has no head."""

    head: str
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class SampleBlock:
    """One response. Its tokens are coloured by values from -`scale` to `scale`, but for context, which is grey."""

    title: str
    facts: tuple[tuple[str, str], ...]
    prompt: str
    parts: tuple[ResponsePart, ...]
    scale: float
    meaning: str  # of a token's value, shown when the reader points at it
    images: tuple[str, ...] = ()  # data URIs of its pictures, in order


@dataclass(frozen=True)
class Pair:
    """Two texts side by side, before and after."""

    title: str
    prompt: str
    left: tuple[str, str]  # head, text
    right: tuple[str, str]


@dataclass(frozen=True)
class StoredResponse:
    """A stored response of a training step. `reason`: why it has no score; "" where it has one."""

    step: int
    row: int
    score: float
    reason: str
    prompt: str
    response: str
    truth: str


@dataclass(frozen=True)
class ResponseTable:
    """A table of responses with search and pages. `links`: label and address of pages with further ones."""

    rows: tuple[StoredResponse, ...]
    links: tuple[tuple[str, str], ...] = ()


Block = Paragraph | Items | Facts | Table | Text | Chart | Stack | Explorer | Lanes | SampleBlock | Pair | ResponseTable


@dataclass(frozen=True)
class PageSection:
    """A heading with blocks. `id` names it in links and tests."""

    id: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Page:
    """A whole page. `curves`: every curve that a chart names, thinned if they are many, except those in `whole`.
    `summary`: shown by browsers without scripts. `headline`: the first statement of the page.
    """

    title: str
    subtitle: str
    sections: tuple[PageSection, ...]
    curves: dict[str, Curve] = field(default_factory=dict)
    whole: frozenset[str] = frozenset()
    summary: Table | None = None
    headline: str = ""
    card: tuple[tuple[str, str], ...] = ()  # names and values below the title
    beside: tuple[tuple[str, "Page"], ...] = ()  # further pages by file name, in a folder beside this one
