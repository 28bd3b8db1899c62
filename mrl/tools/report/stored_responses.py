"""All stored training responses of a run, for a table with search and pages.

The newest steps are in the report itself, as many as PAGE_BYTES hold. Each older step is a page of its own in a folder
beside the report, newest first, up to FOLDER_BYTES.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mrl.errors import DataError
from mrl.record.run_dir import RunDir
from mrl.record.sample_files import readable
from mrl.tools.report.page import Page, PageSection, ResponseTable, StoredResponse
from mrl.tools.report.run_record import RunRecord
from mrl.tools.report.samples import Decode, images_of, text_with_images, truth_of

PAGE_BYTES = 3_000_000  # of texts in the report, which with its curves stays below 5 MB
FOLDER_BYTES = 200_000_000
TEXT = 2000  # characters of a prompt or response, and tokens that are decoded for them
_COLUMNS = ("sample_id", "prompt_ids", "response_ids", "score", "reason", "reward", "images")


def _step_rollouts(run: RunRecord, step: int, decode: Decode | None) -> tuple[StoredResponse, ...]:
    """Returns the responses of a step; none where its samples cannot be read."""
    try:
        return tuple(_rollouts(RunDir(run.path).samples, step, decode))
    except DataError:
        return ()  # the section of the newest step says what is damaged


def _bytes(rows: Sequence[StoredResponse]) -> int:
    """Characters of all texts, and the frame of each row."""
    return sum(60 + len(row.prompt) + len(row.response) + len(row.truth) for row in rows)


def _rollouts(folder: Path, step: int, decode: Decode | None) -> Iterator[StoredResponse]:
    with readable(folder, step):
        file = folder / f"step-{step}.parquet"
        there = [name for name in _COLUMNS if name in pq.read_schema(file).names]
        table = pq.read_table(file, columns=there)
        begins = pc.list_value_length(table["prompt_ids"]).to_pylist()
        for number, row in enumerate(_cut(table).to_pylist()):
            images = images_of(row)
            prompt = text_with_images(row["prompt_ids"], images, decode)
            response = text_with_images(row["response_ids"], images, decode, begins[number])
            yield StoredResponse(
                step,
                number + 1,
                float(row["score"]),
                "" if row["reason"] in (None, "ok") else str(row["reason"]),
                _short(prompt),
                _short(response),
                _short(truth_of(row.get("reward"))),
            )


def _cut(table: pa.Table) -> pa.Table:
    """Returns the table with as many tokens as are shown: lists of Python's numbers would take most of the memory."""
    for number, field in enumerate(table.schema):
        if field.name in ("prompt_ids", "response_ids"):
            table = table.set_column(number, field.name, pc.list_slice(table[field.name], 0, TEXT))
    return table


def _short(text: str) -> str:
    if len(text) <= TEXT:
        return text
    return f"{text[: TEXT - 6]} [...]"


def rollout_table(
    run: RunRecord, decode: Decode | None, folder: Path | None
) -> tuple[ResponseTable | None, list[tuple[str, Page]]]:
    """Returns the report's table, and by file name those pages that `folder` lacks or has from before their samples.

    Without `folder` the table has the newest steps alone.
    """
    rows: list[StoredResponse] = []
    names, pages = [], []
    taken = 0
    for step in reversed(run.sample_steps):
        name = f"step-{step}.html"
        if taken > PAGE_BYTES and folder is not None and _is_current(folder / name, RunDir(run.path).samples):
            taken += (folder / name).stat().st_size
            names.append(name)
            continue
        if taken > (FOLDER_BYTES if folder is not None else PAGE_BYTES):
            break
        of_step = _step_rollouts(run, step, decode)
        taken += _bytes(of_step)
        if taken <= PAGE_BYTES or not rows:
            rows += of_step
        elif folder is not None and of_step:
            section = PageSection("samples", f"Responses of step {step}", (ResponseTable(of_step),))
            pages.append((name, Page(f"{run.name}: step {step}", str(run.path), (section,))))
            names.append(name)
    if not rows:
        return None, []
    links = () if folder is None else tuple((each[:-5].replace("-", " "), f"{folder.name}/{each}") for each in names)
    return ResponseTable(tuple(rows), links), pages


def _is_current(page: Path, samples: Path) -> bool:
    """Whether a step's page was written after its samples."""
    source = samples / page.with_suffix(".parquet").name
    return page.exists() and source.exists() and page.stat().st_mtime > source.stat().st_mtime
