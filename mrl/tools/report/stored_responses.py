"""All stored training responses of a run, for a table with search and pages.

The newest steps are in the report itself, as many as PAGE_BYTES hold. Each older step is a page of its own in a folder
beside the report, newest first, up to FOLDER_BYTES.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from mrl.errors import DataError
from mrl.record.run_dir import RunDir
from mrl.record.sample_files import read_samples, readable
from mrl.tools.report.page import Page, PageSection, ResponseTable, StoredResponse
from mrl.tools.report.run_record import RunRecord
from mrl.tools.report.samples import Decode, images_of, prompt_text, text_of, truth_of

PAGE_BYTES = 3_000_000  # of texts in the report, which with its curves stays below 5 MB
FOLDER_BYTES = 200_000_000
TEXT = 2000  # characters of a prompt or response, and tokens that are decoded for them
_COLUMNS = ("sample_id", "prompt_ids", "response_ids", "score", "reason", "reward", "images")


@dataclass(frozen=True)
class StepRollouts:
    """The responses of a step, and about how many bytes their texts take."""

    step: int
    rows: tuple[StoredResponse, ...]

    @property
    def bytes(self) -> int:
        """Characters of all texts, and the frame of each row."""
        return sum(60 + len(row.prompt) + len(row.response) + len(row.truth) for row in self.rows)


def newest_first(run: RunRecord, decode: Decode | None) -> Iterator[StepRollouts]:
    """Yields the steps whose samples can be read, newest first."""
    for step in reversed(run.sample_steps):
        try:
            yield StepRollouts(step, tuple(_rollouts(RunDir(run.path).samples, step, decode)))
        except DataError:
            continue  # the section of the newest step says what is damaged


def _rollouts(folder: Path, step: int, decode: Decode | None) -> Iterator[StoredResponse]:
    with readable(folder, step):
        file = folder / f"step-{step}.parquet"
        if file.exists():
            there = [name for name in _COLUMNS if name in pq.read_schema(file).names]
            rows = pq.read_table(file, columns=there).to_pylist()
        else:
            rows = [
                row | {key: row["reward"][key] for key in ("score", "reason")} for row in read_samples(folder, step)
            ]
        for number, row in enumerate(rows):
            prompt = prompt_text(row["prompt_ids"][:TEXT], images_of(row), decode)
            yield StoredResponse(
                step,
                number,
                float(row["score"]),
                "" if row["reason"] in (None, "ok") else str(row["reason"]),
                _short(prompt),
                _short(text_of(row["response_ids"][:TEXT], decode)),
                _short(truth_of(row.get("reward"))),
            )


def _short(text: str) -> str:
    if len(text) <= TEXT:
        return text
    return f"{text[: TEXT - 6]} [...]"


def rollout_table(
    run: RunRecord, decode: Decode | None, folder: str
) -> tuple[ResponseTable | None, list[tuple[str, Page]]]:
    """Returns the report's table, and the pages beside it by file name in `folder`. Without `folder` there are none."""
    rows: list[StoredResponse] = []
    pages = []
    taken = 0
    for of_step in newest_first(run, decode):
        taken += of_step.bytes
        if taken <= PAGE_BYTES or not rows:
            rows += of_step.rows
        elif folder and taken <= FOLDER_BYTES:
            name = f"step-{of_step.step}.html"
            section = PageSection("samples", f"Responses of step {of_step.step}", (ResponseTable(of_step.rows),))
            pages.append((name, Page(f"{run.name}: step {of_step.step}", str(run.path), (section,))))
        else:
            break
    if not rows:
        return None, []
    links = tuple((name.removesuffix(".html").replace("-", " "), f"{folder}/{name}") for name, _ in pages)
    return ResponseTable(tuple(rows), links), pages
