"""An agent in a sandbox of the row's image: its process, its home and all that the model has it run.

The chat endpoint is reached inside at the address that it has outside. A row with a task (mrl.acting.sandboxes.tasks)
is judged by its tests, which run once the agent has ended, in a fresh sandbox that has its files.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mrl.acting.agent import ENDPOINT, REWARD_KEY, STOP, variables
from mrl.acting.environment import IMAGES, Environment, Reply, given_by
from mrl.acting.harnesses import HARNESSES, AgentContext, Harness, loop_path
from mrl.acting.sandboxes.broker import Broker
from mrl.acting.sandboxes.sandbox import STOPPED, VARIABLES, Sandbox, SandboxError
from mrl.acting.sandboxes.tasks import TASK, Task
from mrl.acting.tool import LONGEST_AGENT_S, ToolsSpec

HOME = VARIABLES["HOME"]
_KEPT = 20_000  # bytes of what an agent prints
_TOLD = 500  # characters of it in an error


def sandboxed_agent(broker: Broker, spec: ToolsSpec) -> type[Environment]:
    """Returns the environment whose one action is the agent, from its start to its end."""
    harness = HARNESSES[spec.harness] if spec.harness is not None else _of_command(spec.command)
    program = spec.program or harness.program

    class SandboxedAgent(Environment):
        """One agent."""

        actions = ("agent",)
        _sandbox: Sandbox | None = None
        _stop: str | None = None

        def reset(self, row: Mapping[str, Any], seed: int) -> None:
            """Starts the sandbox. Raises SandboxError where it cannot start, or does not have the program."""
            self._stop = row.get(STOP)
            address = row.get(ENDPOINT)
            port = urlsplit(address).port if address else None
            given = given_by(row)
            self._task = Task.of(given) if TASK in given else None
            if self._task is None:
                self._sandbox = broker.start(None, None, port)
            else:
                self._sandbox = self._task.begin(broker, port)
            if not self._sandbox.run(["sh", "-c", 'command -v "$0"', program]).is_well:
                raise SandboxError(f"the image has no program {program!r}: {harness.install}")

        def agent(self, url: str, key: str, row: dict, seconds: float, reward_key: str) -> str:
            """Runs the agent until it has ended, or is stopped."""
            row = self._with_images(row)
            # tests give the reward, where there are some
            context = AgentContext(
                url, key, "" if self._task is not None else reward_key, row, seconds, HOME, spec.harness_config
            )
            for name, text in harness.files(context).items():
                self._sandbox.write(f"{HOME}/{name}", text.encode())
            words = [program, *harness.arguments(context), *spec.arguments]
            if harness.loop is not None:
                loop = f"{HOME}/{harness.loop}"
                self._sandbox.write(loop, Path(loop_path(harness)).read_bytes())
                words.insert(1, loop)
            ran = self._sandbox.run(
                words,
                harness.input(context).encode(),
                LONGEST_AGENT_S,
                _KEPT,
                variables(url, key) | harness.variables(context),
                self._stop,
            )
            if ran.is_well or ran.reason == STOPPED:
                return ""
            end = f"too much of {ran.reason}" if ran.reason else f"exit status {ran.status}"
            raise RuntimeError(f"it ended by {end}: {ran.text.strip()[-_TOLD:]}")

        def _with_images(self, row: dict) -> dict:
            """Returns the row with its prompt's images as files of the sandbox, where it has some."""
            if IMAGES not in row:
                return row
            files = []
            for number, file in enumerate(row[IMAGES], 1):
                files.append(f"{HOME}/images/{number}")
                self._sandbox.write(files[-1], Path(file).read_bytes())
            return {**row, IMAGES: files}

        def judge(self) -> Reply:
            """Runs the row's tests."""
            if self._task is None:
                return Reply()
            reward, parts = self._task.judged(broker, self._sandbox)
            return Reply("", reward, parts)

        def close(self) -> None:
            """Ends the sandbox."""
            if self._stop is not None:
                with suppress(OSError):
                    os.unlink(self._stop)
            if self._sandbox is not None:
                self._sandbox.end()

    return SandboxedAgent


def _of_command(words: tuple[str, ...]) -> Harness:
    """Returns a command of the user's as a harness."""

    def whole_context(context: AgentContext) -> str:
        all_of_it = json.loads(context.as_json)
        return json.dumps({name: all_of_it[name] for name in ("url", "row", "seconds", REWARD_KEY)})

    return Harness(words[0], "put it into the image", lambda context: list(words[1:]), input=whole_context)
