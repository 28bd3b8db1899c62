"""TensorBoard's event files, written with TensorBoard's own writer and without torch."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mrl.record.run_dir import read_metrics
from mrl.record.views import Metrics, Rows, View


class TensorBoardSink(View):
    """Scalars, and validation responses as text.

    What already stands in `history`, the metrics.jsonl of a resumed run, is written first: event files cannot be cut at the resumed step,
    so `RunDir.truncate_metrics` removes them.
    """

    def __init__(self, folder: Path, history: Path | None = None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        from tensorboard.util.tensor_util import make_tensor_proto

        had_events = folder.is_dir() and any(folder.iterdir())
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._metadata, self._tensor = create_summary_metadata, make_tensor_proto
        self._writer = EventFileWriter(str(folder))
        if history is not None and not had_events:
            for row in read_metrics(history):
                self.write(row["training/global_step"], row)

    def write(self, step: int, metrics: Metrics) -> None:
        """Scalars; what is no number is left out."""
        self._add(step, [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items() if value is not None])

    def generations(self, step: int, rows: Rows) -> None:
        """One text a response."""
        self._add(step, [self._text(f"val/generations/{i}", as_markdown(row)) for i, row in enumerate(rows)])

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()

    def _text(self, tag: str, text: str) -> Any:
        metadata = self._metadata(tag, "")
        return self._summary.Value(tag=tag, metadata=metadata, tensor=self._tensor([text.encode("utf-8", "replace")]))

    def _add(self, step: int, values: list[Any]) -> None:
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=values)))
        self._writer.flush()


def as_markdown(row: Mapping[str, Any]) -> str:
    """A response with its prompt, truth and score; indented, so that nothing in it is taken for markup."""
    parts = (("prompt", row["input"]), ("response", row["output"]), ("truth", row["gts"]))
    body = "\n\n".join(f"{name}:\n\n" + "\n".join(f"    {line}" for line in str(text).splitlines()) for name, text in parts)
    return f"score {row['score']:g} ({row['data_source']})\n\n{body}"
