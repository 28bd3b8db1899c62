"""A run's page: its sections and their order. Verdict, settings and curves are here, the others in sections_run.py."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mrl.record.spec import metric_spec
from mrl.tools.report.columns import Curve
from mrl.tools.report.page import Block, Chart, Explorer, Items, Page, PageSection, Paragraph, Series, Table
from mrl.tools.report.run_record import RunRecord
from mrl.tools.report.sections_run import (
    incidents,
    memory,
    reproducibility,
    stacked_curves,
    staleness,
    step_times,
    sync_proof,
)
from mrl.tools.report.sections_samples import samples
from mrl.tools.report.verdict import Verdict, verdict

FOLDED_ABOVE = 12  # rows of a table of settings


@dataclass(frozen=True)
class ChartSpec:
    """A chart of the page: the run's metrics that match regular expressions. `log`: starts with a logarithmic axis."""

    id: str
    title: str
    patterns: tuple[str, ...]
    log: bool = False
    note: str = ""


CHARTS = (
    ChartSpec(
        "reward", "Training score", (r"critic/score/mean", r"critic/rewards/mean"), note="Mean over a step's responses."
    ),
    ChartSpec("held-out", "Held-out score", (r"val-core/.*/mean@\d+",), note="With the 95 % interval over prompts."),
    ChartSpec(
        "kl",
        "KL to the old policy and to the reference",
        (r"actor/ppo_kl", r"actor/kl_loss", r"actor/reward_kl_penalty"),
    ),
    ChartSpec(
        "teacher",
        "KL to the teacher",
        (r"distillation/reverse_kl", r"distillation/loss"),
        note="Of a distillation. It falls while the policy comes nearer.",
    ),
    ChartSpec("entropy", "Entropy", (r"actor/entropy",)),
    ChartSpec(
        "clip",
        "Share that the band clips",
        (r"actor/pg_clipfrac", r"actor/pg_clipfrac_lower"),
        note="Healthy: above 0, up to 0.4.",
    ),
    ChartSpec(
        "mismatch",
        "Generation against training",
        (r"rollout_corr/k3_kl",),
        log=True,
        note="KL(rollout || actor) of the same weights. Above 1e-2 something is wrong.",
    ),
    ChartSpec(
        "mismatch-tokens",
        "Log-prob difference of sampled tokens",
        (r"training/rollout_log_probs_abs_diff_(mean|max)",),
        log=True,
    ),
    ChartSpec("gradient", "Gradient norm before clipping", (r"(actor|critic)/grad_norm",), log=True),
    ChartSpec(
        "critic",
        "Variance of returns that the critic foresees",
        (r"critic/vf_explained_var",),
        note="0: as good as their mean; below 0: worse.",
    ),
    ChartSpec(
        "ratio",
        "Spread of the sequence ratio",
        (r"actor/log_seq_ratio_std",),
        note="The scale that a clip band is to have.",
    ),
    ChartSpec("lengths", "Response length", (r"response_length/(mean|max|min)",)),
    ChartSpec(
        "cut", "Responses cut off at the limit", (r"response_length/clip_ratio", r"val-aux/response_length/clip_ratio")
    ),
    ChartSpec(
        "groups",
        "Groups of one score",
        (r"train/uniform_group_share",),
        note="All responses of the prompt have it. Where advantages compare responses, such a group teaches nothing.",
    ),
    ChartSpec("router", "Router", (r"router/drift", r"router/rollout_drift", r"router/missing_routes")),
    ChartSpec("experts", "Load of experts over the mean", (r"router/load/(max|min)",)),
    ChartSpec("rate", "Learning rate", (r"(actor|critic)/lr",)),
    ChartSpec("speed", "Throughput", (r"perf/throughput",)),
)


def run_page(run: RunRecord) -> Page:
    """Makes the page of one run."""
    outcome = verdict(run)
    sections = (
        PageSection("verdict", "Verdict", tuple(_verdict(outcome, run.notes))),
        PageSection("settings", "What differs from the recipe's defaults", tuple(_settings(run))),
        PageSection("curves", "Curves", tuple(curve_charts(run))),
        *filter(
            None,
            (
                step_times(run),
                memory(run),
                sync_proof(run),
                staleness(run),
                incidents(run),
                samples(run),
                reproducibility(run),
            ),
        ),
    )
    stacked = _stacked(sections, run)
    return Page(
        title=f"{run.settings.text('trainer.experiment_name') or run.name}",
        subtitle=f"{run.path} · {'; '.join(run.settings.head[:1])}",
        sections=sections,
        curves=run.curves | stacked,
        whole=frozenset(stacked),
        summary=summary(run),
        headline=outcome.headline,
    )


def _stacked(sections: tuple[PageSection, ...], run: RunRecord) -> dict[str, Curve]:
    if any(section.id == "steps" for section in sections):
        return stacked_curves(run)
    return {}


def _verdict(outcome: Verdict, notes: tuple[str, ...]) -> Iterator[Block]:
    yield Paragraph(outcome.headline, outcome.tone)
    if outcome.sentences:
        yield Items(outcome.sentences)
    yield Paragraph("What to do next:")
    yield Items(outcome.next_steps)
    if notes:
        yield Items(notes)


def _settings(run: RunRecord) -> Iterator[Block]:
    own = run.settings.own()
    recipe = "the schema (no recipe is named)"
    if run.settings.recipe:
        recipe = f"the recipe {run.settings.recipe} and the schema"
    yield Paragraph(f"{len(own)} of {len(run.settings.by_key)} keys differ from what {recipe} would give.")
    on_command_line = [(setting, usual) for setting, usual in own if setting.on_command_line]
    of_files = [(setting, usual) for setting, usual in own if not setting.on_command_line]
    for rows, caption, folded in (
        (on_command_line, "On the command line", False),
        (of_files, "In files", len(of_files) > FOLDED_ABOVE),
    ):
        if rows:
            cells = tuple((setting.key, setting.value, usual or "(none)", setting.origin) for setting, usual in rows)
            yield Table(("key", "here", "otherwise", "set by"), cells, caption=f"{caption}: {len(rows)}", folded=folded)


def curve_charts(run: RunRecord) -> Iterator[Block]:
    """Yields the charts for which the run has metrics, and one for any metric."""
    for spec in CHARTS:
        if names := [name for pattern in spec.patterns for name in run.matching(pattern)]:
            yield Chart(
                spec.id, spec.title, unit_of(names[0]), tuple(_series(run, name) for name in names), spec.log, spec.note
            )
    if run.curves:
        yield Explorer("any-metric", tuple(sorted(run.curves)))


def _series(run: RunRecord, name: str) -> Series:
    return Series(name, name, interval_of(run, name))


def interval_of(run: RunRecord, metric: str) -> tuple[str, str] | None:
    """Returns the curves of both ends of a held-out score's 95 % interval; None for other metrics."""
    auxiliary = re.sub("^val-core/", "val-aux/", metric)
    ends = (f"{auxiliary}/ci95_low", f"{auxiliary}/ci95_high")
    if all(end in run.curves for end in ends):
        return ends
    return None


def unit_of(name: str) -> str:
    """Returns the unit of a metric; "" for a plain number, or a metric that this version does not know."""
    try:
        unit = metric_spec(name).unit
    except KeyError:
        return ""
    if unit == "1":
        return ""
    return unit


def summary(run: RunRecord) -> Table:
    """Returns the curves as numbers, for browsers without scripts."""
    names = [name for spec in CHARTS for pattern in spec.patterns for name in run.matching(pattern)]
    rows = []
    for name in names:
        curve = run.curves[name]
        values = (curve.values[0], curve.last, curve.values.min(), curve.values.max())
        rows.append((name, unit_of(name), str(curve.of), *(f"{value:.4g}" for value in values)))
    return Table(("metric", "unit", "steps", "first", "last", "smallest", "largest"), tuple(rows), (2, 3, 4, 5, 6))
