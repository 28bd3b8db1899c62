"""Takes groups that an earlier start finished with the served weights, instead of asking engines.

    spool.left --read_left--> Replays --take_over--> buffer and judged groups, as if engines had answered at once

The schedule decides as usual which groups are issued and when. Only the source of their tokens differs. When the
weights change, all remaining groups are dropped.
"""

from collections.abc import Callable, Mapping

from mrl.generate.group_writer import GroupParts
from mrl.generate.judged_groups import JudgedGroups
from mrl.generate.numbered_prompts import NumberedPrompts
from mrl.generate.rollouts import prompt_seed
from mrl.generate.spool import Spool
from mrl.schedule.buffer import GroupBuffer
from mrl.schedule.groups import Group, State


class Replays:
    """The remaining groups of an earlier start, by number."""

    def __init__(
        self,
        left: Mapping[int, GroupParts],
        spool: Spool,
        prompts: NumberedPrompts,
        seed: int,
        groups_again: Callable[[int], None],
    ):
        """`seed`: of the run. `groups_again` is told how many groups of `left` are not used after all."""
        self._left = dict(left)
        self._groups_again = groups_again
        self._spool = spool
        self._prompts = prompts
        self._seed = seed
        self._responses = 0  # taken since the last metrics

    def take_over(self, group: Group, buffer: GroupBuffer, judged: JudgedGroups) -> bool:
        """Ends the group with its stored responses and rewards. Returns whether there were usable ones."""
        parts = self._left.pop(group.number, None)
        if parts is None or group.state is State.FINISHED:
            return False
        refusal = self._refusal(parts, group, buffer.step)
        if refusal:
            print(f"group {group.number} of an earlier start {refusal}, and is generated again", flush=True)
            self._spool.give_up([group.number])
            self._groups_again(1)
            return False
        judged.take_over(group, parts)
        buffer.start(group.number)
        for index, response in parts.responses.items():
            group.begun = min(group.begun, int(response.versions.min()))
            if not group.ended[index]:
                more = response.lengths[1] - group.lengths[index]
                buffer.add(group.number, index, more, ended=True)
                self._responses += 1
        return True

    def _refusal(self, parts: GroupParts, group: Group, version: int) -> str:
        """Returns why `parts` cannot stand for new responses by weights of this version; empty if they can."""
        if not self._answers(parts, group):
            return "was asked for otherwise"
        if parts.newest > version:
            return f"has tokens of weights after step {version}"
        return ""

    def _answers(self, parts: GroupParts, group: Group) -> bool:
        """Tells whether `parts` are all responses of this attempt.

        Their seeds must be those that they would have now. They must continue the group's kept tokens.
        """
        if parts.attempt != group.attempts or parts.responses.keys() != set(range(len(group.ended))):
            return False
        prompt, _ = self._prompts[group.number]
        for index, response in parts.responses.items():
            rows = response.rows
            added = int(rows.response_lengths[0]) - group.lengths[index]
            if added < 0 or (group.ended[index] and added):
                return False
            seed = prompt_seed(self._seed, self._prompts, group.number, index)
            if (int(rows.prompt_id[0]), int(rows.seed[0])) != (prompt.prompt_id, seed):
                return False
        return True

    def give_up(self) -> None:
        """Drops the remaining groups, because their weights are no longer served."""
        if self._left:
            self._groups_again(len(self._left))
        self._left.clear()

    def metrics(self) -> dict[str, float]:
        """Returns metrics of the groups taken since the last call."""
        responses = self._responses
        self._responses = 0
        return {"trainer/replayed_responses": float(responses)}
