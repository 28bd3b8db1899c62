"""Defines a rule: a function of configuration and model, or a row where one condition gives one violation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mrl.config.schema import RunConfig, leaf
from mrl.errors import Violation
from mrl.model import ModelSpec

Rule = Callable[[RunConfig, ModelSpec], Iterator[Violation]]


@dataclass(frozen=True, eq=False)
class RuleRow:
    """A rule that `field` breaks where `broken` returns True.

    `rule` and `why` are formatted with c (configuration) and m (model). `allowed` may be a function of both.
    """

    field: str
    broken: Callable[[RunConfig, ModelSpec], bool]
    rule: str
    why: str
    allowed: tuple[Any, ...] | Callable[[RunConfig, ModelSpec], tuple[Any, ...]] = ()

    def __call__(self, config: RunConfig, model: ModelSpec) -> Iterator[Violation]:
        """Yields the violation where the rule is broken. Raises UnknownValue where it reads a refused key."""
        if self.broken(config, model):
            allowed = self.allowed(config, model) if callable(self.allowed) else self.allowed
            rule, why = (text.format(c=config, m=model) for text in (self.rule, self.why))
            yield Violation(self.field, rule, why, allowed)


def on_only_where(
    field: str,
    holds: Callable[[RunConfig, ModelSpec], bool],
    rule: str,
    why: str,
    allowed: tuple[Any, ...] = (False,),
) -> RuleRow:
    """Builds the row of a key that may be on (not null, false or 0) only where `holds` returns True."""
    return RuleRow(field, lambda c, m: leaf(c, field) and not holds(c, m), rule, why, allowed)
