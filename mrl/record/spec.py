"""The table of all metrics that a run may write: metrics.yaml. Loads without torch, for code and docs.

Names are verl's where verl has the same metric, so that dashboards carry over. Names under `reshard/` and `router/` are
mrl's own. A `*` in a name stands for any text without an empty part: `val-core/*/mean@*`.
"""

import difflib
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["sum", "mean", "max", "min", "last"]
TABLE = Path(__file__).with_name("metrics.yaml")


@dataclass(frozen=True)
class MetricSpec:
    """One metric, or one family of metrics with the same meaning. `reading` explains its values, where that is known.

    `kind` says how parts of updates and ranks become one number. Parts of a mean are (sum of value x weight, sum
    of weight), all others (value, 1). `last` takes the last part, for values that all ranks share, such as the learning
    rate.
    """

    name: str
    kind: Kind
    unit: str
    summary: str
    reading: str = ""


# standard deviation <- (first moment, second moment): deviations cannot be added, but their moments can
DEVIATIONS: dict[str, tuple[str, str]] = {
    "actor/log_seq_ratio_std": ("actor/log_seq_ratio_mean", "actor/log_seq_ratio_square_mean")
}


@functools.cache
def all_metrics() -> tuple[MetricSpec, ...]:
    """Returns the rows of the table in its order. The file is read on the first call."""
    import yaml  # not at the top: ranks and engines import this module but never read the table

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's loader is ten times as fast
    rows = loader(TABLE.read_text(encoding="utf-8")).get_single_data()
    specs = []
    family = ""
    shared = ""
    for name, row in rows.items():
        if "kind" not in row:
            family = name
            shared = row["reading"]
            continue
        inherited = ""
        if family and name.startswith(family):
            inherited = shared
        specs.append(MetricSpec(name, **{"reading": inherited, **row}))
    return tuple(specs)


@functools.cache
def metric_spec(name: str) -> MetricSpec:
    """Returns the entry for `name`: an exact one, else the first matching pattern.

    Raises KeyError with the nearest names.
    """
    specs = {spec.name: spec for spec in all_metrics()}
    if name in specs and "*" not in name:
        return specs[name]
    for pattern, spec in specs.items():
        if "*" in pattern and re.fullmatch(re.escape(pattern).replace(r"\*", "(.+)"), name):
            return spec
    nearest = difflib.get_close_matches(name, specs, n=3, cutoff=0.5)
    raise KeyError(
        f"no metric is declared under the name {name!r}; nearest in mrl/record/metrics.yaml: "
        f"{', '.join(nearest) or 'none'}"
    )
