"""Prompts in a temporary Arrow file that is mapped into memory: a data set of any size costs the pages that are being read."""

import tempfile
from pathlib import Path

import pyarrow as pa

ROWS_PER_CHUNK = 4096
SCHEMA = pa.schema([("tokens", pa.list_(pa.int32())), ("rest", pa.string())])


class PromptStore:
    """Takes rows, then gives them back as a table. The file lies in TMPDIR, loses its name once it is read, and goes with the process."""

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile(prefix="mrl-prompts-", suffix=".arrow")  # noqa: SIM115  kept open until `finish`
        self._writer = pa.ipc.new_file(self._file.name, SCHEMA)
        self._tokens: list[list[int]] = []
        self._rest: list[str] = []

    def add(self, tokens: list[int], rest: str) -> None:
        """One prompt: its token ids, and everything else as text."""
        self._tokens.append(tokens)
        self._rest.append(rest)
        if len(self._tokens) == ROWS_PER_CHUNK:
            self._flush()

    def finish(self) -> pa.Table:
        """All rows, memory-mapped; nothing can be added any more."""
        self._flush()
        self._writer.close()
        with pa.memory_map(self._file.name) as source:
            table = pa.ipc.open_file(source).read_all()
        self._file.close()
        return table

    def close(self) -> None:
        """Removes the file of a store that was not finished."""
        if not Path(self._file.name).exists():
            return
        self._writer.close()
        self._file.close()

    def _flush(self) -> None:
        self._writer.write_batch(pa.record_batch([pa.array(self._tokens, SCHEMA.field(0).type), pa.array(self._rest)], schema=SCHEMA))
        self._tokens, self._rest = [], []
