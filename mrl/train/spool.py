"""Groups that are finished and not yet trained on, on the disk: written once, beside the loop, for checkpoints.

    RUN/spool/group-N.npz    the responses to the prompt of number N
    checkpoints/step-M/      has those on their way at step M: finished ones under a second name, others written then

What finds no room here is told once, and written with the checkpoint.
"""

import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from mrl.checkpoint.group_files import group_file, name_again
from mrl.cluster.stored_samples import StoredSamples
from mrl.errors import EnvironmentFault


class GroupFileWriter(Protocol):
    """Writes files of groups; see GroupWriter."""

    def begin(self, path: Path, responses: StoredSamples) -> Any:
        """Begins with a file; facts of it to come."""

    def facts(self, under_way: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Of each file, once all are written."""


class Spool:
    """Files of finished groups by number."""

    def __init__(self, folder: Path, writer: GroupFileWriter):
        """Makes `folder` where there is none.

        What an earlier process left in it is removed: the checkpoint has its own names for it.
        """
        self._folder, self._writer = folder, writer
        self._begun: dict[int, Any] = {}
        self._written: dict[int, dict[str, Any]] = {}  # facts of files that came from a checkpoint
        self._unwanted: set[int] = set()  # files that may still come
        self._told = False
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def put(self, number: int, responses: StoredSamples) -> None:
        """The group is finished: its file is begun."""
        self._unwanted.discard(number)  # it was finished before, by responses that became too old
        self._begun[number] = self._writer.begin(self._folder / group_file(number), responses)

    def take_over(self, number: int, written: Path, facts: dict[str, Any]) -> None:
        """The group was finished by an earlier process, and a checkpoint has its file."""
        name_again(written, self._folder / group_file(number))
        self._written[number] = facts

    def forget(self, numbers: Iterable[int]) -> None:
        """They are trained on; checkpoints that have them keep them."""
        self._unwanted |= {number for number in numbers if self.holds(number)}
        for number in sorted(self._unwanted):
            self._begun.pop(number, None)
            self._written.pop(number, None)
            with suppress(FileNotFoundError):
                (self._folder / group_file(number)).unlink()
                self._unwanted.discard(number)

    def holds(self, number: int) -> bool:
        """Whether the file of the group is written, or begun."""
        return number in self._begun or number in self._written

    def write(self, folder: Path, groups: Mapping[int, StoredSamples]) -> dict[str, dict[str, Any]]:
        """All of `groups` into `folder`, each as a file; size and digest by name. Raises as GroupWriter.facts."""
        named = {group_file(number): self._named(number, folder) for number in groups}
        begun = {
            group_file(number): self._writer.begin(folder / group_file(number), responses)
            for number, responses in groups.items()
            if named[group_file(number)] is None
        }
        return {name: facts for name, facts in named.items() if facts} | self._writer.facts(begun)

    def _named(self, number: int, folder: Path) -> dict[str, Any] | None:
        """Facts of a file that the spool has, which `folder` has too now; None where it has none."""
        name, begun = group_file(number), self._begun.get(number)
        try:
            facts = self._writer.facts({name: begun})[name] if begun is not None else self._written.get(number)
            if facts is None:
                return None
            name_again(self._folder / name, folder / name)
        except FileNotFoundError:  # trained on meanwhile
            return None
        except EnvironmentFault as fault:
            self._tell(fault)
            return None
        return facts

    def _tell(self, fault: EnvironmentFault) -> None:
        if not self._told:
            print(f"warning: {self._folder}: {fault}. Groups are written with checkpoints instead", flush=True)
            self._told = True

    def close(self) -> None:
        """Removes all files, once nothing is written any more:
        checkpoints have names of their own for what they need.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
