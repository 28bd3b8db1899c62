"""Groups that a start before this one finished by the weights that are served: taken in place of asking engines.

    spool.left --read_left--> Replays --take_over--> buffer and judged groups, as if engines had answered at once

The schedule decides which groups are issued and when, as ever; only where their tokens come from is another. With
other weights all that is left is given up.
"""

from collections.abc import Mapping

from mrl.flow.group_writer import GroupParts
from mrl.schedule.buffer import GroupBuffer
from mrl.schedule.groups import Group, State
from mrl.train.judged_groups import JudgedGroups
from mrl.train.numbered_prompts import NumberedPrompts
from mrl.train.rollouts import prompt_seed
from mrl.train.spool import Spool


class Replays:
    """What is left of a start before, by number."""

    def __init__(self, left: Mapping[int, GroupParts], spool: Spool, prompts: NumberedPrompts, seed: int):
        """`seed`: of the run."""
        self._left = dict(left)
        self._spool = spool
        self._prompts = prompts
        self._seed = seed
        self._responses = 0  # that were taken since it was last told

    def take_over(self, group: Group, buffer: GroupBuffer, judged: JudgedGroups) -> bool:
        """Ends the group by what is left of it, with its rewards; whether there was any that can be used."""
        parts = self._left.pop(group.number, None)
        if parts is None or group.state is State.FINISHED:
            return False
        refusal = self._refusal(parts, group, buffer.step)
        if refusal:
            print(f"group {group.number} of a start before {refusal}, and is generated again", flush=True)
            self._spool.give_up([group.number])
            return False
        judged.take_over(group, parts)
        buffer.start(group.number)
        for index, response in parts.responses.items():
            group.begun = min(group.begun, int(response.rows.span_versions.min()))
            if not group.ended[index]:
                more = int(response.rows.response_lengths[0]) - group.lengths[index]
                buffer.add(group.number, index, more, ended=True)
                self._responses += 1
        return True

    def _refusal(self, parts: GroupParts, group: Group, version: int) -> str:
        """Says why these do not stand for what engines would make of the group by weights of this version; else ''."""
        if not self._answers(parts, group):
            return "was asked for otherwise"
        if parts.newest > version:
            return f"has tokens of weights after step {version}"
        return ""

    def _answers(self, parts: GroupParts, group: Group) -> bool:
        """Whether these are all responses of this attempt, by seeds that they would have now, and go on from the tokens
        that are kept of it.
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
        """Gives up what is left; the weights that it was made by are served no more."""
        self._left.clear()

    def metrics(self) -> dict[str, float]:
        """Metrics of what was taken since the last call."""
        taken = self._responses
        self._responses = 0
        return {"trainer/replayed_responses": float(taken)}
