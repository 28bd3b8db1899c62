"""Sandboxes in which commands of a model or an agent run, by one protocol.

sandbox.py       Sandbox: run, read, write, end; and its limits
starting.py      start: an image or a root folder becomes a sandbox
bubblewrap.py    of a root folder, by bubblewrap; no daemon is needed
namespaces.py    mounts and a network of its own for it: calls of the kernel
watching.py      runs a process with a time limit, and watches what it takes
containers.py    of an image, by the daemon of Docker or Podman
remote.py        of E2B, Modal and Daytona, by their own clients
forwarder.py     leads a port inside to the chat endpoint outside
broker.py        the process that starts them, since the processes of tools are confined themselves
trial.py         tries each backend, for `mrl doctor`
tasks.py         a row's task: image, setup, tests; and its reward
task_rows.py     reads rows of SWE-bench, R2E-Gym and Harbor
repository.py    the built-in environment `repository`: a task with a shell
sandboxed_agent.py   an agent in a sandbox, judged by the row's tests
"""
