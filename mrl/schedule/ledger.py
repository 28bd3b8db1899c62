"""The issued groups and their states, as JSON beside a checkpoint. A resumed run loses and repeats no group.

The position in the data is the oldest number that is not settled, never the newest issued one. Settled numbers beyond
it are listed, and each live group has the number of kept tokens of each response. The tokens themselves are rows of
samples. A ledger is taken between two steps, when a batch that was trained on is already settled.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mrl.errors import DataError
from mrl.schedule.buffer import GroupBuffer
from mrl.schedule.groups import Counts, Group
from mrl.schedule.staleness import Schedule

# numbers, boundaries and batches depend on these; other fields may change in a resumed run
FIXED = (
    "batch",
    "responses",
    "max_tokens",
    "order",
    "max_staleness",
    "partial_rollouts",
    "segment_tokens",
    "whole_batches",
)


@dataclass(frozen=True)
class Ledger:
    """The state of a buffer between two steps."""

    schedule: Schedule
    step: int
    next_number: int
    admitted: int
    settled: tuple[int, ...]  # trained on or dropped, at or above the frontier
    groups: tuple[Group, ...]
    counts: Counts

    @property
    def frontier(self) -> int:
        """Position where the data continues. Numbers below it are settled."""
        return min((group.number for group in self.groups), default=self.next_number)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data, which `from_json` reads back."""
        parts = {
            "schedule": asdict(self.schedule),
            "counts": self.counts.to_json(),
        }
        numbers = {name: getattr(self, name) for name in ("step", "next_number", "admitted")}
        return parts | numbers | {"settled": list(self.settled), "groups": [group.to_json() for group in self.groups]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Ledger":
        """Reads what `to_json` made. Raises DataError if numbers are missing or doubled."""
        ledger = cls(
            Schedule(**data["schedule"]),
            data["step"],
            data["next_number"],
            data["admitted"],
            tuple(data["settled"]),
            tuple(map(Group.from_json, data["groups"])),
            Counts.from_json(data["counts"]),
        )
        _check_numbers(ledger)
        return ledger


def _check_numbers(ledger: Ledger) -> None:
    """Checks that each number from the frontier on occurs exactly once."""
    listed = sorted([*ledger.settled, *(group.number for group in ledger.groups)])
    expected = list(range(ledger.frontier, ledger.next_number))
    if listed != expected:
        wrong = sorted(set(listed) ^ set(expected)) or [n for n in expected if listed.count(n) > 1]
        raise DataError(
            f"the ledger of groups is damaged: numbers {wrong[:10]} are missing, doubled or were never issued"
        )


def snapshot(buffer: GroupBuffer) -> Ledger:
    """Returns a copy of the buffer's state. Raises ValueError while a step has its batch."""
    if buffer.trained != buffer.step * buffer.schedule.batch:
        raise ValueError(f"step {buffer.step} is being trained on")
    groups = tuple(Group.from_json(buffer.groups[number].to_json()) for number in sorted(buffer.groups))
    counts = Counts.from_json(buffer.counts.to_json())
    numbers = (buffer.step, buffer.next_number, buffer.admitted, tuple(sorted(buffer.settled)))
    return Ledger(buffer.schedule, *numbers, groups, counts)


def begun_anew(ledger: Ledger, numbers: Collection[int] | None = None) -> Ledger:
    """Returns the ledger with these groups without tokens, each for the step that it was issued for. None: all."""
    groups = []
    for group in ledger.groups:
        has_begun = group.tokens or any(group.ended)
        if has_begun and (numbers is None or group.number in numbers):
            group = replace(group.anew(), begun=group.begun)
        groups.append(group)
    return replace(ledger, groups=tuple(groups))


def reissued(ledger: Ledger, dropped: Collection[int]) -> Ledger:
    """Returns the ledger with `dropped` groups live again, without tokens, because their rewards no longer hold.

    The groups that replaced them are live too, so there may be too many. Ready first, only as many are issued again as
    may exist. In order, the last groups are withdrawn, and the data gives their prompts again later. A group that would
    be trained on too late after its first token begins anew.
    """
    schedule = ledger.schedule
    in_order = schedule.order == "in_order"
    again = sorted(dropped)
    begun = ledger.step
    if not in_order:
        again = again[: max(0, schedule.max_groups - len(ledger.groups))]
        begun = None
    if not again:
        return ledger
    first = min(ledger.frontier, again[0])
    size = schedule.responses
    groups = [*ledger.groups, *(replace(Group.new(number, size).anew(), begun=begun) for number in again)]
    groups.sort(key=lambda group: group.number)
    end = ledger.next_number
    if in_order:
        end = next((group.number for group in groups[schedule.admitted :]), end)
        groups = [_in_time(group, index, ledger) for index, group in enumerate(groups[: schedule.admitted])]
    live = {group.number for group in groups}
    known = {*ledger.settled, *range(first, ledger.frontier)} - live
    settled = tuple(sorted(number for number in known if number < end))
    return replace(ledger, next_number=end, settled=settled, groups=tuple(groups))


def _in_time(group: Group, index: int, ledger: Ledger) -> Group:
    """In order: returns the group, begun anew if its first token would be too old. `index`: among the live groups."""
    trained = ledger.step + index // ledger.schedule.batch
    if group.begun is not None and group.begun < trained - ledger.schedule.max_staleness:
        return replace(group.anew(), begun=ledger.step)
    return group


def check_goes_on(ledger: Ledger, schedule: Schedule) -> None:
    """Raises DataError for a ledger of a schedule with other rules."""
    _check_same(asdict(ledger.schedule), asdict(schedule), FIXED)


def begun_at(step: int, number: int, schedule: Schedule) -> GroupBuffer:
    """Makes a buffer that continues after `step` with group `number`, when nothing is known of earlier groups."""
    return restored(Ledger(schedule, step, number, step - 1, (), (), Counts()), schedule)


def restored(ledger: Ledger, schedule: Schedule) -> GroupBuffer:
    """Returns a buffer that continues from the ledger, with nothing running. Call `check_goes_on` first."""
    ledger = Ledger.from_json(ledger.to_json())  # groups of its own
    buffer = GroupBuffer(schedule)
    buffer.step = ledger.step
    buffer.next_number = ledger.next_number
    buffer.admitted = ledger.admitted
    buffer.trained = ledger.step * schedule.batch
    buffer.frontier = ledger.frontier
    buffer.settled = set(ledger.settled)
    buffer.counts = ledger.counts
    for group in ledger.groups:
        buffer.put_back(group)
    return buffer


def _check_same(then: Mapping[str, Any], now: Mapping[str, Any], names: Sequence[str]) -> None:
    changed = [
        f"{name} ({json.dumps(then[name])} then, {json.dumps(now[name])} now)"
        for name in names
        if then[name] != now[name]
    ]
    if changed:
        raise DataError(
            f"groups that the checkpoint left unfinished were made with other values of {', '.join(changed)}"
        )
