"""Rules of the chat endpoint and of the agent that talks to it: what goes together, and what an agent excludes."""

from collections.abc import Iterator

from mrl.config.rule_row import RuleRow
from mrl.config.schema import RunConfig
from mrl.errors import Violation
from mrl.model import ModelSpec

VERIFIERS = "verifiers"  # the harness


def _belongs(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """Checks that endpoint, agent and budgets are given together."""
    rollout = config.rollout
    if not rollout.endpoint:
        if rollout.agent is not None:
            why = "an agent speaks to the model over the endpoint"
            yield Violation("rollout.agent", "must be left out without rollout.endpoint: true", why, (None,))
        return
    if rollout.agent is None:
        why = "nothing else would call the model"
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
    in_sandbox = config.rollout.agent is not None and config.rollout.agent.in_sandbox
    if not turns.network and not in_sandbox:
        why = "an agent reaches the endpoint by a socket; what shuts off the network shuts off those of this host too"
        yield Violation("rollout.turns.network", "must be true with rollout.endpoint: true", why, (True,))


def _one_agent(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """Checks that an agent is named in one way, and that what goes with a harness has one."""
    agent = config.rollout.agent
    if agent is None:
        return
    given = {"command": bool(agent.command), "path": agent.path is not None, "harness": agent.harness is not None}
    named = [name for name, is_given in given.items() if is_given]
    if len(named) != 1:
        rule = "must be given where there is no path and no harness, and left out with one"
        why = "an agent is a command, a function of the file under path, or a harness"
        yield Violation("rollout.agent.command", rule, why)
    for name, empty in (("program", None), ("arguments", ()), ("harness_config", {})):
        if getattr(agent, name) and agent.harness is None:
            yield Violation(
                f"rollout.agent.{name}", "must be left out without a harness", "it is the harness's", (empty,)
            )
    if agent.harness is not None and agent.harness_config:
        from mrl.acting.harnesses import HARNESSES

        if fault := HARNESSES[agent.harness].config_fault(agent.harness_config):
            yield Violation("rollout.agent.harness_config", fault, "it is merged into the harness's own")
    if agent.harness == VERIFIERS and not agent.harness_config.get("taskset"):
        why = "it names the taskset, as under [env] of a TOML file of verifiers"
        yield Violation("rollout.agent.harness_config", "must have `taskset` with the harness verifiers", why)
    if agent.harness is not None and config.rollout.turns is not None and "HOME" in config.rollout.turns.environment:
        why = "the harness's configuration is written into a HOME of its own"
        yield Violation("rollout.turns.environment", "must not name HOME with a harness", why)


def _sandboxed(config: RunConfig, _: ModelSpec) -> Iterator[Violation]:
    """Checks that an agent can run in a sandbox, and reach the endpoint from there."""
    agent = config.rollout.agent
    turns = config.rollout.turns
    if agent is None or not agent.in_sandbox or turns is None:
        return
    if agent.path is not None or agent.harness == VERIFIERS:
        why = "a function of a file, and environments of verifiers, run in processes of this host"
        yield Violation("rollout.agent.in_sandbox", "must be false with them", why, (False,))
    if turns.sandbox is None:
        why = "it says what starts sandboxes"
        yield Violation("rollout.turns.sandbox", "must be given with rollout.agent.in_sandbox: true", why, ({},))
        return
    if turns.sandbox.backend not in ("bubblewrap", "docker"):
        why = "the endpoint is on this host, and sandboxes of others run elsewhere"
        rule = "must be bubblewrap or docker with rollout.agent.in_sandbox: true"
        yield Violation("rollout.turns.sandbox.backend", rule, why, ("bubblewrap", "docker"))
    if turns.sandbox.backend == "docker" and turns.sandbox.network is not None:
        why = "the endpoint is led into the container's own loopback, which it has without a network"
        rule = "must be left out with docker and rollout.agent.in_sandbox: true"
        yield Violation("rollout.turns.sandbox.network", rule, why, (None,))


ENDPOINT_RULES = (
    _belongs,
    _one_agent,
    _sandboxed,
    _own_tools,
    RuleRow(
        "actor.router_replay",
        lambda c, m: c.rollout.endpoint and c.actor.router_replay == "R3",
        "must not be R3 with rollout.endpoint: true",
        "routes may be incomplete where an agent edits its history",
        ("disabled", "R2"),
    ),
    RuleRow(
        "trainer.partial_rollouts",
        lambda c, m: c.rollout.endpoint and c.trainer.partial_rollouts,
        "must be false with rollout.endpoint: true",
        "an agent's actions cannot be repeated under newer weights",
        (False,),
    ),
    RuleRow(
        "actor.use_remove_padding",
        lambda c, m: c.rollout.endpoint and not c.actor.use_remove_padding,
        "must be true with rollout.endpoint: true",
        "a response with branches is several sequences; padded to one length they would take several times the memory",
        (True,),
    ),
)
