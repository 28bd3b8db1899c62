"""An agent with a shell and nothing else: it asks, runs what the model calls, and ends when nothing more is called.

A program of the standard library alone, so that it runs wherever Python does, in a sandbox's image too. Address and key
are in the variables OPENAI_BASE_URL and OPENAI_API_KEY; standard input is a JSON object with `row` and `config`
(`seconds` of a command, and `most` characters of its output).
"""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

SHELL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Runs a command of the shell, and returns what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "a line or a script"}},
            "required": ["command"],
        },
    },
}
BAD_REQUEST = 400
UNAUTHORIZED = 401


def said(messages):
    """Returns the model's next message; None where the conversation is over."""
    body = json.dumps({"model": "policy", "messages": messages, "tools": [SHELL]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the endpoint is on this host
    try:
        with opener.open(request) as answer:
            return json.load(answer)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        why = error.read().decode("utf-8", "replace")
        if error.code == BAD_REQUEST and "the conversation is over" in why:
            return None
        if error.code == UNAUTHORIZED and "no session that is under way" in why:  # it has ended meanwhile
            return None
        raise SystemExit(f"the endpoint answers {error.code}: {why[:500]}") from error


def ran(arguments, seconds, most):
    """Runs what a call asks for, and returns what the model reads."""
    try:
        command = json.loads(arguments)["command"]
    except (ValueError, TypeError, LookupError):
        return "Error: bash takes one argument, command"
    if not isinstance(command, str):
        return "Error: command is a text"
    process = subprocess.Popen(
        ["sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    ending = ""
    try:
        output = process.communicate(timeout=seconds)[0]
        if process.returncode:
            ending = f"\n(it ended by status {process.returncode})"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0]
        ending = f"\n(it was ended after {seconds:g} s)"
    text = output.decode("utf-8", "replace")
    if len(text) > most:
        half = most // 2
        text = text[:half] + f"\n[{len(text) - 2 * half} characters are left out]\n" + text[-half:]
    return (text + ending).strip() or "(it printed nothing)"


def main():
    """Runs the loop."""
    context = json.load(sys.stdin)
    config = context.get("config") or {}
    messages = list(context["row"]["prompt"])
    while True:
        message = said(messages)
        if message is None or not message.get("tool_calls"):
            return
        messages.append(message)
        for call in message["tool_calls"]:
            answer = ran(call["function"]["arguments"], config.get("seconds", 30.0), config.get("most", 8000))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer})


if __name__ == "__main__":
    main()
