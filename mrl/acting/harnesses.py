"""Harnesses by name: how agents of others are started for one response, and what stands in their home.

    claude_code       Claude Code, over Anthropic's form
    codex             Codex, over the Responses API
    mini_swe_agent    mini-swe-agent, over chat completions
    plain             a loop of mrl's own with a shell (plain_loop.py)
    verifiers         an environment of the package `verifiers` (verifiers_loop.py)

A harness is a program, and knows nothing of the process that starts it: beside this host it may run in a sandbox.
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERIFIERS = "verifiers"
MODEL = "policy"  # the endpoint's only one
_HERE = Path(__file__).parent
_PATIENCE_MS = 24 * 3600 * 1000  # of a client for one answer; the run has limits of its own
_BARE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


@dataclass(frozen=True)
class AgentContext:
    """What one response's agent is given. `config` is rollout.agent.harness_config."""

    url: str
    key: str
    reward_key: str
    row: Mapping[str, Any]
    seconds: float
    home: str  # an absolute path
    config: Mapping[str, Any]

    @property
    def task(self) -> str:
        """The texts of the row's messages."""
        return "\n\n".join(str(message["content"]) for message in self.row.get("prompt") or ())

    @property
    def as_json(self) -> str:
        """All of it but the key, which is in variables, for programs of mrl's own."""
        context = {"url": self.url, "row": dict(self.row), "seconds": self.seconds, "reward_key": self.reward_key}
        return json.dumps(context | {"config": dict(self.config)}, default=str)


@dataclass(frozen=True)
class Harness:
    """How one is started. Paths of `files` begin at the agent's home."""

    program: str  # sought where programs are, unless rollout.agent.program names it
    install: str  # how to get the version that was tried
    arguments: Callable[[AgentContext], list[str]]
    files: Callable[[AgentContext], dict[str, str]] = lambda context: {}
    variables: Callable[[AgentContext], dict[str, str]] = lambda context: {}
    input: Callable[[AgentContext], str] = lambda context: context.task
    loop: str | None = None  # file of mrl's own that the program, an interpreter, runs
    fault: Callable[[Mapping[str, Any]], str] = lambda config: ""  # what is wrong with a harness_config; empty: nothing
    tries_config: bool = False  # the loop's argument `check` finds that out with the harness's own package

    def config_fault(self, config: Mapping[str, Any]) -> str:
        """Says what is wrong with a harness_config, as far as that is known without the harness; empty for nothing."""
        try:
            json.dumps(config)
        except (TypeError, ValueError) as error:
            return f"must hold texts, numbers, booleans, lists and mappings alone: {error}"
        return self.fault(config)


def _claude_files(context: AgentContext) -> dict[str, str]:
    accepted = {"hasCompletedOnboarding": True, "bypassPermissionsModeAccepted": True}
    return {".claude.json": json.dumps(accepted), ".claude/settings.json": json.dumps(dict(context.config))}


def _claude_variables(context: AgentContext) -> dict[str, str]:
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    off = ("DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC")
    return {
        **dict.fromkeys(models, MODEL),
        **dict.fromkeys(off, "1"),
        "IS_SANDBOX": "1",  # else it asks for its permissions again where its user is root
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it would differ from request to request: each a branch of its own
        "API_TIMEOUT_MS": str(_PATIENCE_MS),
    }


def _codex_files(context: AgentContext) -> dict[str, str]:
    provider = {
        "name": "mrl",
        "base_url": f"{context.url}/v1",
        "env_key": "OPENAI_API_KEY",
        "wire_api": "responses",
        "request_max_retries": 1,
        "stream_max_retries": 0,
        "stream_idle_timeout_ms": _PATIENCE_MS,
    }
    own = {
        "model": MODEL,
        "model_provider": "mrl",
        "approval_policy": "never",
        "sandbox_mode": "danger-full-access",
        "model_providers": {"mrl": provider},
    }
    return {".codex/config.toml": toml(merged(own, context.config))}


def _codex_fault(config: Mapping[str, Any]) -> str:
    try:
        is_same = tomllib.loads(toml(config)) == config
    except tomllib.TOMLDecodeError:
        is_same = False
    return "" if is_same else "must hold what TOML can: no null, and no mappings in lists"


def _plain_fault(config: Mapping[str, Any]) -> str:
    for name, value in config.items():
        if name not in _OF_PLAIN:
            return f"has {name!r}; known with the harness plain: {', '.join(_OF_PLAIN)}"
        if isinstance(value, bool) or not isinstance(value, _OF_PLAIN[name]) or value <= 0:
            return f"has the value {value!r} of {name}, which is a number above 0"
    return ""


_OF_PLAIN: dict[str, Any] = {"seconds": int | float, "most": int}
_MINI = "mrl.yaml"


def _mini_files(context: AgentContext) -> dict[str, str]:
    own = {
        "run": {"task": context.task},
        "model": {"model_name": f"openai/{MODEL}", "cost_tracking": "ignore_errors"},
        "agent": {"cost_limit": 0, "mode": "yolo", "confirm_exit": False},
    }
    return {_MINI: json.dumps(merged(own, context.config))}  # JSON is YAML


def _mini_arguments(context: AgentContext) -> list[str]:
    return [
        "-c",
        "mini.yaml",
        "-c",
        f"{context.home}/{_MINI}",
        "-y",
        "--exit-immediately",
        "-o",
        f"{context.home}/last.json",
    ]


HARNESSES: dict[str, Harness] = {
    "claude_code": Harness(
        "claude",
        "npm install -g @anthropic-ai/claude-code@2.1.197",
        lambda context: ["-p", "--permission-mode", "bypassPermissions", "--output-format", "json"],
        _claude_files,
        _claude_variables,
    ),
    "codex": Harness(
        "codex",
        "npm install -g @openai/codex@0.171.0",
        lambda context: ["exec", "--skip-git-repo-check", "-"],
        _codex_files,
        lambda context: {"CODEX_HOME": f"{context.home}/.codex"},
        fault=_codex_fault,
    ),
    "mini_swe_agent": Harness(
        "mini",
        "pip install 'mrl[mini-swe-agent]' (2.4.6)",
        _mini_arguments,
        _mini_files,
        lambda context: {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_GLOBAL_CONFIG_DIR": f"{context.home}/.config/mini-swe-agent",
        },
        lambda context: "",
    ),
    "plain": Harness(
        "python3",
        "Python 3.8 or newer",
        lambda context: [],
        input=lambda context: context.as_json,
        loop="plain_loop.py",
        fault=_plain_fault,
    ),
    VERIFIERS: Harness(
        "python3",
        "pip install verifiers==0.4.0, in a virtual environment of its own",
        lambda context: [],
        input=lambda context: context.as_json,
        loop="verifiers_loop.py",
        tries_config=True,
    ),
}


def loop_path(harness: Harness) -> str:
    """Returns the path of mrl's own file that the harness's interpreter runs."""
    return str(_HERE / harness.loop)


def merged(own: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Returns mappings merged at every depth; `more` wins."""
    found = dict(own)
    for name, value in more.items():
        if isinstance(value, Mapping) and isinstance(found.get(name), Mapping):
            found[name] = merged(found[name], value)
        else:
            found[name] = value
    return found


def toml(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> str:
    """Returns a mapping as TOML. Values are texts, numbers, booleans, lists of these, and mappings."""
    plain = {name: value for name, value in values.items() if not isinstance(value, Mapping)}
    # JSON writes these as TOML does, but for the character DEL
    lines = [f"{_toml_key(name)} = {json.dumps(value)}".replace("\x7f", "\\u007f") for name, value in plain.items()]
    if above and lines:
        lines.insert(0, f"[{'.'.join(map(_toml_key, above))}]")
    below = [toml(value, (*above, name)) for name, value in values.items() if isinstance(value, Mapping)]
    return "\n".join([*lines, *below])


def _toml_key(name: str) -> str:
    return name if name and set(name) <= _BARE else json.dumps(name)
