"""An MCP server that does what none should. It speaks the protocol of 2025 by hand."""

import json
import os
import socket
import sys
import time
from pathlib import Path

NAMES = sys.argv[1].split(",") if len(sys.argv) > 1 else ["does"]


def say(message: dict) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0"} | message) + "\n")
    sys.stdout.flush()


def does(what: str) -> str:
    if what == "die":
        os._exit(3)
    if what == "hang":
        time.sleep(3600)
    if what == "stray":
        print("a line that is no message\n{}\n[1]", flush=True)
    if what == "many lines":
        while True:
            print("x" * 100)
    if what == "a long line":
        while True:
            sys.stdout.write("x" * 1_000_000)
    if what == "a long answer":
        return "y" * 4_000_000
    if what == "change":
        NAMES[:] = ["other"]
    if what == "connect":
        socket.create_connection(("127.0.0.1", 9), 1)
    if what == "write":
        Path("/var/mrl-odd.written").write_text("")
    if what == "child":
        return str(os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000"))
    return str(os.getpid())


def tools() -> list[dict]:
    schema = {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]}
    return [{"name": name, "description": "Does it.", "inputSchema": schema} for name in NAMES]


def answer(method: str, given: dict) -> dict:
    if method == "initialize":
        about = {"name": "odd", "version": "1"}
        return {"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        return {"tools": tools()}
    if method == "tools/call" and given["name"] in NAMES:
        return {"content": [{"type": "text", "text": does(given["arguments"]["what"])}]}
    raise LookupError(f"unknown: {given.get('name', method)}")


for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    try:
        say({"id": asked["id"], "result": answer(asked["method"], asked.get("params", {}))})
    except Exception as error:
        code = -32601 if asked["method"] == "server/discover" else -32602
        say({"id": asked["id"], "error": {"code": code, "message": f"{type(error).__name__}: {error}"}})
