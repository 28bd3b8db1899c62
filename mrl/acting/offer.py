"""What may be called in a run, and what the responses to one row may call.

A row's extra_info can select it: `environment`, one of rollout.turns.environments or "" for none, and `tool_selection`
(verl's name), some of rollout.turns.tools. Without these, a row has all tools, and the environment if there is only
one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# keys of extra_info
ENVIRONMENT = "environment"
SELECTION = "tool_selection"

Schemas = tuple[Mapping[str, Any], ...]


class UnknownChoice(ValueError):
    """A row names something that the run does not have. The message says what it has."""


@dataclass(frozen=True)
class Offer:
    """What may be called in a run, in the form of chat templates: tools, and the actions of each environment."""

    tools: Schemas
    environments: Mapping[str, Schemas] = field(default_factory=dict)
    unrepeatable: tuple[str, ...] = ()  # environments that cannot be restored
    rewards: bool = False  # the environment gives the reward, so every row needs one
    of_tasks: tuple[str, ...] = ()  # environments that need a task with tests of each row
    agent: bool = False  # an agent replaces both, and brings its own tools

    @property
    def all_schemas(self) -> Schemas:
        """Schemas of all tools and of all environments' actions."""
        return self.tools + tuple(each for actions in self.environments.values() for each in actions)

    def schemas(self, extra_info: Mapping[str, Any]) -> Schemas:
        """Returns schemas of what a row's responses may call: tools, then the environment's actions. Raises
        UnknownChoice.
        """
        if self.agent:
            if self.of_tasks and extra_info.get("task") is not None:
                _check_task(extra_info)
            return ()
        selected = self._selected(extra_info.get(SELECTION))
        environment = self.environment(extra_info)
        if environment in self.of_tasks:
            _check_task(extra_info)
        actions = ()
        if environment is not None:
            actions = self.environments[environment]
        both = sorted({name_of(each) for each in actions} & set(selected))
        if both:
            raise UnknownChoice(
                f"{both[0]!r} is a tool, and an action of the environment {environment!r}: the model could not say "
                f"which it calls; rename one, or leave the tool out of extra_info.{SELECTION}"
            )
        return tuple(each for each in self.tools if name_of(each) in selected) + actions

    def _selected(self, selection: Any) -> Sequence[str]:
        known = [name_of(schema) for schema in self.tools]
        if selection is None:
            return known
        if not isinstance(selection, list | tuple):
            raise UnknownChoice(f"extra_info.{SELECTION} is {str(selection)[:60]!r}, expected a list of names")
        unknown = [name for name in selection if name not in known]
        if unknown:
            has = ", ".join(known) or "none"
            raise UnknownChoice(f"extra_info.{SELECTION} names {unknown[0]!r}; rollout.turns.tools has {has}")
        return selection

    def environment(self, extra_info: Mapping[str, Any]) -> str | None:
        """Returns the row's environment; None for none. Raises UnknownChoice."""
        named = extra_info.get(ENVIRONMENT)
        known = list(self.environments)
        if named is None and len(known) > 1:
            raise UnknownChoice(
                f"extra_info.{ENVIRONMENT} is missing; it has to be one of {', '.join(known)}, or empty"
            )
        if named is None:
            if known:
                return known[0]
            return None
        if named == "" and self.rewards:
            raise UnknownChoice(
                f"extra_info.{ENVIRONMENT} is empty, and reward.function: environment takes the reward from one; name "
                f"one of {', '.join(known)}, or give a reward function of your own (reward.custom_reward_function)"
            )
        if named == "":
            return None
        if named not in known:
            has = ", ".join(known) or "none"
            raise UnknownChoice(f"extra_info.{ENVIRONMENT} names {named!r}; rollout.turns.environments has {has}")
        return named

    def needs_row(self, extra_info: Mapping[str, Any]) -> bool:
        """Tells whether an engine needs the row, not only its prompt."""
        return self.agent or bool(self.environments) or extra_info.get(SELECTION) is not None


def name_of(schema: Mapping[str, Any]) -> str:
    """Returns the name of a tool or an action."""
    return schema["function"]["name"]


def _check_task(extra_info: Mapping[str, Any]) -> None:
    from mrl.acting.sandboxes.tasks import Task  # here: few runs have tasks

    try:
        Task.of(extra_info)
    except ValueError as error:
        raise UnknownChoice(str(error)) from error
