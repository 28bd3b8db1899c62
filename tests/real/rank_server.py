"""A process that has imported torch, Megatron and mrl once, and forks a rank for every request: an import takes 6 s of
CPU.

It holds no thread, process group or patch when it forks, so that a rank is as fresh as a new interpreter. Requests and
answers are lines of JSON on standard input and output; it ends with its input. See ranks.py, its only client.
"""

import json
import os
import runpy
import sys
import threading
import traceback
from pathlib import Path

import mrl.rank.actor  # noqa: F401


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what an import prints is no answer
    assert threading.active_count() == 1, threading.enumerate()
    for line in sys.stdin:
        request = json.loads(line)
        answer = _start(**request["start"]) if "start" in request else _exit_code(request["poll"])
        answers.write(json.dumps(answer) + "\n")


def _start(program: str, arguments: list[str], environment: dict[str, str], log: str) -> int:
    """Process id of `python program *arguments`, in a process group of its own, its output in the file `log`.

    Not in a session of its own: the kernel gives every session an equal share, and eight ranks would leave a run beside
    them a ninth.
    """
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        _redirect(log)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [program, *arguments]
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # not into the loop above, which is the parent's


def _redirect(log: str) -> None:
    out, nothing = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), os.open(os.devnull, os.O_RDONLY)
    for source, number in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(source, number)


def _exit_code(pid: int) -> int | None:
    """None while the rank runs; negative for one that a signal ended."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


if __name__ == "__main__":
    main()
