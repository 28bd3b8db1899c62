"""Output of long-running processes that loses what a full disk refuses, instead of ending the process.

Python keeps text that could not be written, and raises again at each later print and at the end of the process.
"""

import errno
import io
from typing import TextIO

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Lossy(io.FileIO):
    def write(self, data: bytes | memoryview) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return memoryview(data).nbytes


def lossy(stream: TextIO) -> TextIO:
    """Returns a stream to the same file, which flushes each line; `stream` itself if there is no file below it."""
    try:
        descriptor = stream.fileno()
    except (OSError, AttributeError):
        return stream
    stream.flush()
    file = io.BufferedWriter(_Lossy(descriptor, "w", closefd=False))
    return io.TextIOWrapper(file, encoding=stream.encoding, errors=stream.errors, line_buffering=True)
