"""The built-in environment `repository`: a row's task, on which a model acts by a shell, and its tests as the reward.

A row names the task under extra_info.task (mrl.acting.sandboxes.tasks). Sandboxes are those of rollout.turns.sandbox.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mrl.acting.environment import LONGEST, Environment, Reply
from mrl.acting.sandboxes.broker import Broker
from mrl.acting.sandboxes.sandbox import KEY
from mrl.acting.sandboxes.tasks import Task
from mrl.errors import ConfigError


def repository(broker: Broker | None) -> type[Environment]:
    """Returns the environment. Raises ConfigError where no sandboxes are configured."""
    if broker is None:
        raise ConfigError(f"rollout.turns.environments: repository acts in sandboxes; set {KEY}.backend")

    class Repository(Environment):
        """One task."""

        actions = ("run",)
        has_task = True
        parts = MappingProxyType({"passed": 0.0, "ended": 0.0})
        _sandbox = None

        def reset(self, row: Mapping[str, Any], seed: int) -> None:
            """Starts the sandbox. Raises ValueError for a row without tests, SandboxError where it cannot start."""
            self._task = Task.of(row["extra_info"])
            self._sandbox = self._task.begin(broker)

        def run(self, command: str) -> Reply:
            """Runs a command of the shell in the repository, and says what it prints.

            Args:
                command: a line or a script; what it leaves running ends with it
            """
            ran = self._sandbox.shell(command, seconds=broker.spec.max_command_seconds, most=LONGEST // 2)
            said = ran.text
            if ran.reason:
                said += f"\n(it was ended: too much of {ran.reason})"
            elif ran.status:
                said += f"\n(it ended by status {ran.status})"
            return Reply(said.strip() or "(it printed nothing)")

        def judge(self) -> Reply:
            """Runs the tests."""
            reward, parts = self._task.judged(broker, self._sandbox)
            return Reply("", reward, parts)

        def close(self) -> None:
            """Ends the sandbox."""
            if self._sandbox is not None:
                self._sandbox.end()

    return Repository
