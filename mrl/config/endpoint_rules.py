"""Rules of the chat endpoint and of the agent that talks to it: what goes together, and what an agent excludes."""

from collections.abc import Iterator

from mrl.config.rule_row import RuleRow
from mrl.config.schema import RunConfig
from mrl.errors import Violation
from mrl.model import ModelSpec


def _belongs(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """Checks that endpoint, agent and budgets are given together."""
    rollout = config.rollout
    if not rollout.endpoint:
        if rollout.agent is not None:
            why = "an agent speaks to the model over the endpoint"
            yield Violation("rollout.agent", "must be left out without rollout.endpoint: true", why, (None,))
        return
    if rollout.agent is None:
        why = "nobody else speaks to the model"
        yield Violation("rollout.agent", "must be given with rollout.endpoint: true", why)
    if rollout.turns is None:
        why = "its max_turns, max_seconds, timeout_s and num_workers are the agent's"
        yield Violation("rollout.turns", "must be given with rollout.endpoint: true", why)


def _own_tools(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """Checks that the agent alone has tools, and that it reaches the endpoint."""
    turns = config.rollout.turns
    if not config.rollout.endpoint or turns is None:
        return
    why = "an agent brings its own tools, and calls them itself"
    for name, empty in (("tools", ()), ("environments", ()), ("mcp_servers", {})):
        if getattr(turns, name):
            yield Violation(f"rollout.turns.{name}", "must be empty with rollout.endpoint: true", why, (empty,))
    for name in ("path", "index", "tool_config_path"):
        if getattr(turns, name) is not None:
            yield Violation(f"rollout.turns.{name}", "must be left out with rollout.endpoint: true", why, (None,))
    if not turns.network:
        why = "an agent reaches the endpoint by a socket; what shuts off the network shuts off those of this host too"
        yield Violation("rollout.turns.network", "must be true with rollout.endpoint: true", why, (True,))


ENDPOINT_RULES = (
    _belongs,
    RuleRow(
        "rollout.agent.command",
        lambda c, m: (
            c.rollout.agent is not None and bool(c.rollout.agent.command) == (c.rollout.agent.path is not None)
        ),
        "must be given where there is no path, and left out with one",
        "an agent is a command, or a function of the file under path",
    ),
    _own_tools,
    RuleRow(
        "actor.router_replay",
        lambda c, m: c.rollout.endpoint and c.actor.router_replay == "R3",
        "must not be R3 with rollout.endpoint: true",
        "where an agent goes back to an earlier place, the routes of kept tokens were never seen to be complete",
        ("disabled", "R2"),
    ),
    RuleRow(
        "trainer.partial_rollouts",
        lambda c, m: c.rollout.endpoint and c.trainer.partial_rollouts,
        "must be false with rollout.endpoint: true",
        "what an agent did until then cannot be repeated where its response continues",
        (False,),
    ),
    RuleRow(
        "actor.use_remove_padding",
        lambda c, m: c.rollout.endpoint and not c.actor.use_remove_padding,
        "must be true with rollout.endpoint: true",
        "a response whose agent goes back is several sequences; padded to one length they would take a multiple of its "
        "memory",
        (True,),
    ),
)
