"""The section of samples: best, worst and most changed responses of a training step, and of held-out prompts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mrl.errors import DataError
from mrl.record.run_dir import RunDir
from mrl.record.shown_rows import LONGEST, read_shown_rows
from mrl.reward.items import UNJUDGED
from mrl.tools.report.heldout import Response
from mrl.tools.report.page import Block, PageSection, Pair, Paragraph, SampleBlock
from mrl.tools.report.run_record import RunRecord
from mrl.tools.report.samples import Decode, TrainingSample, decoder, looked_at, parts_of, text_of

PAIRS = 4
TEXT_LIMIT = 6000  # limit of shown characters of a held-out response


def samples(run: RunRecord) -> PageSection | None:
    """Makes the section with samples of the newest step, and of the first and last validation."""
    blocks = [*_training(run), *_held_out(run)]
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
    decode = decoder(_tokenizer_folders(run))
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
            yield _sample_block(kind, step, sample, decode, colour)


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


def _tokenizer_folders(run: RunRecord) -> list[Path]:
    stored = [RunDir(run.path).checkpoints / f"step-{step}" / "hf" for step in reversed(run.checkpoints)]
    return [Path(run.settings.text("model.path")), *stored]


def _sample_block(kind: str, step: int, sample: TrainingSample, decode: Decode | None, colour: _Colour) -> SampleBlock:
    shown = min(len(sample.response_ids), LONGEST)
    cut = len(sample.response_ids) - shown
    facts = [
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
        f"{kind.capitalize()}: row {sample.row} of step {step}",
        tuple(facts),
        text_of(sample.prompt_ids, decode),
        parts_of(sample, values, decode),
        colour.scale,
        colour.meaning,
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
    yield Paragraph(f"Held-out responses that changed most from step {steps[0]} to step {steps[-1]}: up, then down.")
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
        f"{before.data_source}, prompt {before.prompt_id}: {before.score:.3g} to {after.score:.3g} (truth: "
        f"{before.truth[:200]})"
    )
    return Pair(
        title,
        before.input[:TEXT_LIMIT],
        (f"step {first}, score {before.score:.3g}", before.output[:TEXT_LIMIT]),
        (f"step {last}, score {after.score:.3g}", after.output[:TEXT_LIMIT]),
    )
