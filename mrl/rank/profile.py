"""A profile of one step on one rank, which the driver begins and ends (record.profile)."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from mrl.config.schema import ProfileConfig
from mrl.platforms import Platform


class StepProfile:
    """Records from `begin` to `end`, which the same thread calls."""

    def __init__(self, config: ProfileConfig, platform: Platform) -> None:
        self._platform = platform
        self._config = config
        self._torch: torch.profiler.profile | None = None

    def begin(self) -> None:
        """Begins to record."""
        if self._config.tool == "nsys":
            self._platform.capture(True)
            return
        self._torch = torch.profiler.profile(activities=self._platform.profiled())
        self._torch.start()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Names the work of the block."""
        with self._platform.span(name):
            yield

    def end(self, file: Path) -> str | None:
        """Ends the recording, and writes `file` where torch recorded. Returns why it could not be written."""
        self._platform.synchronize()
        if self._torch is None:
            self._platform.capture(False)
            return None
        self._torch.stop()
        part = file.with_name(f"part-{file.name}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._torch.export_chrome_trace(str(part))
            part.replace(file)
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            return f"no profile of a step was written into {file.parent}: {error}"
        return None
