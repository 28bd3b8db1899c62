"""A run's page: its sections and their order. Verdict, settings, curves and samples are here.

Samples are the best, worst and most changed responses of a training step, and of held-out prompts. Other sections are
in sections_run.py.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.errors import DataError
from mrl.plain_files import LINES_BYTES, parse_json, read_text
from mrl.record.run_dir import RunDir
from mrl.record.shown_rows import LONGEST, read_shown_rows
from mrl.record.spec import metric_spec
from mrl.reward.items import UNJUDGED
from mrl.tools.explain.band import usual
from mrl.tools.report.metric_words import in_words
from mrl.tools.report.page import (
    Block,
    Chart,
    Explorer,
    Items,
    Page,
    PageSection,
    Pair,
    Paragraph,
    ResponseTable,
    SampleBlock,
    Series,
    Table,
)
from mrl.tools.report.paired_tests import Response
from mrl.tools.report.pictures import picture
from mrl.tools.report.run_record import RunRecord
from mrl.tools.report.samples import Decode, TrainingSample, decoder, looked_at, parts_of, text_with_images
from mrl.tools.report.sections_run import (
    card,
    drafts,
    incidents,
    memory,
    plan_compared,
    reproducibility,
    stacked_curves,
    staleness,
    step_times,
    sync_proof,
)
from mrl.tools.report.stored_responses import rollout_table
from mrl.tools.report.verdict import Verdict, verdict

_SCORE = "critic/score/mean"
FOLDED_ABOVE = 12  # rows of a table of settings
PAIRS = 4
TEXT_LIMIT = 6000  # limit of shown characters of a held-out response


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
    ChartSpec("held-out", "Validation score", (r"val-core/.*/mean@\d+",), note="With the 95 % interval over prompts."),
    ChartSpec(
        "kl",
        "KL to the old policy and to the reference",
        (r"actor/ppo_kl", r"actor/kl_loss", r"actor/reward_kl_penalty"),
    ),
    ChartSpec(
        "teacher",
        "KL to the teacher",
        (r"distillation/reverse_kl", r"distillation/loss"),
        note="It falls as the policy approaches its teacher.",
    ),
    ChartSpec("entropy", "Entropy", (r"actor/entropy",)),
    ChartSpec(
        "clip",
        "Clip fraction",
        (r"actor/pg_clipfrac", r"actor/pg_clipfrac_lower"),
        note="Healthy: above 0, up to 0.4.",
    ),
    ChartSpec(
        "mismatch",
        "Mismatch of generation and training",
        (r"rollout_corr/k3_kl",),
        log=True,
        note="KL(rollout || actor) with the same weights. Above 1e-2 something is wrong.",
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
        "Explained variance of the critic",
        (r"critic/vf_explained_var",),
        note="0: as good as their mean; below 0: worse.",
    ),
    ChartSpec(
        "ratio",
        "Spread of the sequence ratio",
        (r"actor/log_seq_ratio_std",),
        note="A clip range should be of this size.",
    ),
    ChartSpec("lengths", "Response length", (r"response_length/(mean|max|min)",)),
    ChartSpec(
        "cut",
        "Responses truncated at the limit",
        (r"response_length/clip_ratio", r"val-aux/response_length/clip_ratio"),
    ),
    ChartSpec(
        "groups",
        "Groups without reward variance",
        (r"train/uniform_group_share",),
        note="All responses have one score; where advantages compare responses, such a group teaches nothing.",
    ),
    ChartSpec("router", "Router", (r"router/drift", r"router/rollout_drift", r"router/missing_routes")),
    ChartSpec("experts", "Load of experts over the mean", (r"router/load/(max|min)",)),
    ChartSpec("rate", "Learning rate", (r"(actor|critic)/lr",)),
    ChartSpec("speed", "Throughput", (r"perf/throughput",)),
)


def run_page(run: RunRecord, folder: Path | None = None) -> Page:
    """Makes the page of one run. `folder`: the one that pages beside it lie in; None: they are left out."""
    outcome = verdict(run)
    table, beside = rollout_table(run, decoder_of(run), folder)
    sections = (
        PageSection("verdict", "Verdict", tuple(_verdict(outcome, run.notes))),
        PageSection("curves", "Curves", tuple(curve_charts(run))),
        PageSection("next", "What to do next", (Items(outcome.next_steps),)),
        *filter(None, (explained(run),)),
        PageSection("settings", "Changed settings", tuple(_settings(run))),
        *filter(
            None,
            (
                step_times(run),
                plan_compared(run),
                memory(run),
                sync_proof(run),
                staleness(run),
                drafts(run),
                incidents(run),
                samples(run, table),
                reproducibility(run),
            ),
        ),
    )
    stacked = {}
    if any(section.id == "steps" for section in sections):
        stacked = stacked_curves(run)
    return Page(
        title=f"{run.settings.text('trainer.experiment_name') or run.name}",
        subtitle=f"{run.path} · {'; '.join(run.settings.head[:1])}",
        sections=sections,
        curves=run.curves | stacked,
        whole=frozenset(stacked),
        summary=summary(run),
        headline=outcome.headline,
        card=tuple(card(run)),
        beside=tuple(beside),
    )


def _verdict(outcome: Verdict, notes: tuple[str, ...]) -> Iterator[Block]:
    yield Paragraph(outcome.headline, outcome.tone)
    if outcome.sentences:
        yield Items(outcome.sentences)
    if notes:
        yield Items(notes)


def explained(run: RunRecord) -> PageSection | None:
    """Makes the section of the newest answer of `mrl explain`, with the curves that left the band. A damaged one counts
    as none.
    """
    try:
        told = parse_json(read_text(RunDir(run.path).explained, LINES_BYTES))
        blocks = tuple(_explained(run, told))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return PageSection("explained", "What mrl explain found", blocks)


def _explained(run: RunRecord, told: Mapping[str, Any]) -> Iterator[Block]:
    verdicts = told["verdicts"]
    where = "No step leaves the run's own band" if told["step"] is None else f"Step {told['step']}"
    if verdicts:
        yield Paragraph(f"{where}: {verdicts[0]['cause']}.", "bad")
    elif told["breaks"]:
        yield Paragraph(f"{where} leaves the run's own band, and nothing that was tried removes that.", "warn")
    else:
        yield Paragraph(f"{where}.", "good")
    said = {True: "It repeats bit by bit: ", False: "It does NOT repeat: ", None: ""}[told["repeats"]]
    replayed = told["replayed"] or "nothing was computed again"
    yield Paragraph(f"{said}{replayed} (mrl explain, after {told['steps']} steps).")
    if told["steps"] != run.last_step:
        yield Paragraph(
            f"The run has {run.last_step} steps now, and this answer is of {told['steps']} (mrl explain {run.path} "
            "gives a new one).",
            "warn",
        )
    if verdicts:
        rows = tuple(
            (str(i), each["kind"], each["cause"], each["evidence"], each["change"])
            for i, each in enumerate(verdicts, 1)
        )
        yield Table(("", "kind", "cause", "evidence", "what to change"), rows, (0,))
    for each in told["breaks"][:3]:
        name = each["name"]
        band = usual(each["low"], each["high"], each["chance"])
        note = f"step {each['step']}: {_number(each['value'])}, {band}"
        if name in run.curves:
            yield Chart(f"explained-{name.replace('/', '-')}", name, unit_of(name), (Series(name, name),), note=note)
    if told["experiments"]:
        shares = sorted(told["experiments"].items(), key=lambda pair: -pair[1])
        rows = tuple((name, f"{share:.0%}") for name, share in shares)
        yield Table(
            ("computed again", "of the break is gone"), rows, (1,), caption=f"Experiments: {len(rows)}", folded=True
        )


def _number(value: float | None) -> str:
    return "no finite number" if value is None else f"{value:.3g}"


def _settings(run: RunRecord) -> Iterator[Block]:
    own = [pair for pair in run.settings.own() if pair[0].key != "trainer.run_dir"]
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
        first = next((name for name in (_SCORE, "critic/rewards/mean") if name in run.curves), "")
        yield Explorer("any-metric", tuple(sorted(run.curves)), first=first)


def _series(run: RunRecord, name: str) -> Series:
    return Series(in_words(name), name, interval_of(run, name))


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


def samples(run: RunRecord, table: ResponseTable | None = None) -> PageSection | None:
    """Makes the section with samples of the newest step, of the first and last validation, and a table of all."""
    blocks = [*_training(run), *_held_out(run), *([table] if table else [])]
    if blocks:
        return PageSection("samples", "Samples", tuple(blocks))
    return None


def _training(run: RunRecord) -> Iterator[Block]:
    if not run.sample_steps:
        return
    shown = read_shown_rows(run.path)
    step = run.sample_steps[-1]
    if shown is not None and shown.step in run.sample_steps:
        step = shown.step
    try:
        found = looked_at(RunDir(run.path).samples, step, shown)
    except DataError as error:
        yield Paragraph(str(error), "warn")
        return
    decode = decoder_of(run)
    every = [sample for chosen in found.values() for sample in chosen]
    colour = _colour(every)
    grey = ""
    if any(sample.sampled is not None for sample in every):
        grey = " What is grey was read (answers of tools, the template), and is not trained on."
    yield Paragraph(
        f"Training step {step}: {', '.join(_KINDS[kind] for kind in found)}. {colour.words}{grey} Point at a token for "
        "its number."
    )
    if decode is None:
        yield Paragraph(
            "No tokenizer is at hand (model.path, or a checkpoint's hf folder): tokens are shown by number."
        )
    for kind, chosen in found.items():
        for sample in chosen:
            yield _sample_block(kind, step, sample, decode, colour, RunDir(run.path).images)


def decoder_of(run: RunRecord) -> Decode | None:
    """Returns a decoder by the tokenizer of the model, or of a checkpoint."""
    stored = [RunDir(run.path).checkpoints / f"step-{step}" / "hf" for step in reversed(run.checkpoints)]
    return decoder([Path(run.settings.text("model.path")), *stored])


_KINDS = {
    "best": "the best",
    "worst": "the worst",
    "changed": "those whose log-probs differ most between engine and trainer",
}
_LEAST_SCALE = 0.02  # nats; a smaller difference is rounding, and stays white


@dataclass(frozen=True)
class _Colour:
    """The meaning of a token's colour, and the value of the full colour."""

    words: str
    meaning: str
    scale: float


def _colour(samples: Sequence[TrainingSample]) -> _Colour:
    """Chooses differences if any is known, else the engine's log-probs."""
    gaps = [abs(gap) for sample in samples for gap in _gaps(sample) if gap is not None]
    if not gaps:
        words = "A token's colour is the log-prob that the engine gave it: white was certain, red a rare choice."
        return _Colour(words, "log-prob", 8.0)
    scale = max(_LEAST_SCALE, max(gaps))
    words = (
        "A token's colour is the trainer's log-prob less the engine's, of the same weights: green where the trainer "
        "gave more, red "
        f"less, full at {scale:.2g} nats; the largest here is {max(gaps):.2g}."
    )
    return _Colour(words, "trainer less engine, nats:", scale)


def _gaps(sample: TrainingSample) -> list[float | None]:
    """Returns the trainer's minus the engine's log-prob of each shown token; None if one is missing."""
    pairs = zip(sample.old_log_probs or [], sample.log_probs, strict=False)
    return [None if old is None or rollout is None else old - rollout for old, rollout in pairs]


def _sample_block(
    kind: str, step: int, sample: TrainingSample, decode: Decode | None, colour: _Colour, images: Path
) -> SampleBlock:
    """`images`: folder of the run's images."""
    shown = min(len(sample.response_ids), LONGEST)
    cut = len(sample.response_ids) - shown
    facts = [
        *([("ground truth", sample.truth)] if sample.truth else []),
        ("score", f"{sample.score:.4g}"),
        ("tokens", str(len(sample.response_ids))),
        ("ended by", sample.stop_reason),
        ("weights", " then ".join(f"v{version}" for version in sample.versions)),
        ("prompt", str(sample.prompt_id)),
    ]
    if sample.reason not in ("ok", "None"):
        facts.append(("reward", sample.reason))
    if cut:
        facts.append(("not shown", f"{cut} tokens"))
    values = _gaps(sample) if colour.meaning != "log-prob" else sample.log_probs[:LONGEST]
    values = [*values, *[None] * (shown - len(values))]
    return SampleBlock(
        f"{kind.capitalize()}: row {sample.row + 1} of step {step}",
        tuple(facts),
        text_with_images(sample.prompt_ids, sample.images, decode),
        parts_of(sample, values, decode),
        colour.scale,
        colour.meaning,
        tuple(uri for image in sample.images if (uri := picture(images, image.name)) is not None),
    )


def _held_out(run: RunRecord) -> Iterator[Block]:
    """Yields responses with the same prompt and seed whose score changed most between the first and the last
    validation.
    """
    steps = run.validation_steps
    if len(steps) < 2:
        return
    first = {_key(response): response for response in _judged(run, steps[0])}
    last = {_key(response): response for response in _judged(run, steps[-1])}
    shared = [(first[key], last[key]) for key in first if key in last and first[key].output != last[key].output]
    if not shared:
        return
    yield Paragraph(f"Validation responses that changed most from step {steps[0]} to step {steps[-1]}: up, then down.")
    ordered = sorted(shared, key=lambda pair: pair[1].score - pair[0].score)
    half = PAIRS // 2
    chosen = ordered[::-1][:half] + [pair for pair in ordered[:half] if pair not in ordered[::-1][:half]]
    for before, after in chosen:
        yield _pair(before, after, steps[0], steps[-1])


def _judged(run: RunRecord, step: int) -> list[Response]:
    return [response for response in run.responses(step) if response.reason not in UNJUDGED]


def _key(response: Response) -> tuple[str, int, int, str]:
    return response.data_source, response.prompt_id, response.sample_id, response.input


def _pair(before: Response, after: Response, first: int, last: int) -> Pair:
    title = (
        f"{before.data_source}, prompt {before.prompt_id}: {before.score:.3g} to {after.score:.3g} (ground "
        f"truth: {before.truth[:200]})"
    )
    return Pair(
        title,
        before.input[:TEXT_LIMIT],
        (f"step {first}, score {before.score:.3g}", before.output[:TEXT_LIMIT]),
        (f"step {last}, score {after.score:.3g}", after.output[:TEXT_LIMIT]),
    )
