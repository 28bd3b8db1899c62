"""Tools of MCP servers: one made with the package, by standard input and HTTP, and one that does what none should."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from base64 import b64encode
from pathlib import Path
from types import SimpleNamespace

import pytest
from seldom import seldom

from mrl.acting.environment import Reply
from mrl.acting.environment_pool import EnvironmentPool, check_tools
from mrl.acting.mcp_tools import MOST_LINES, ServerSpec, ToolError, changes_of, reply_with
from mrl.acting.offer import name_of
from mrl.acting.tool import ToolsSpec
from mrl.data.parameter_types import typed_parameters
from mrl.errors import ConfigError
from mrl.tools.rehearse.made_up_calls import made_up_calls

mcp = pytest.importorskip("mcp")
HERE = Path(__file__).parent
REFERENCE = [sys.executable, str(HERE / "mcp_reference.py")]
ODD = [sys.executable, "-S", str(HERE / "mcp_odd.py")]
PUT = {"what": "a cup", "where": {"row": 2}}


def servers(**given) -> ToolsSpec:
    return ToolsSpec((), mcp_servers=given)


def said(pool: EnvironmentPool, name: str, **arguments) -> tuple[str, str]:
    return tuple(pool.call(name, arguments).result()[:2])


def listed() -> list[dict]:
    """What the package's own client lists of the reference server."""

    async def asked():
        async with mcp.Client(mcp.StdioServerParameters(command=REFERENCE[0], args=REFERENCE[1:])) as client:
            return (await client.list_tools()).tools

    return [
        {"name": each.name, "description": each.description, "parameters": each.input_schema}
        for each in asyncio.run(asked())
    ]


def check_reference(pool: EnvironmentPool) -> None:
    assert said(pool, "put", **PUT) == ("ok", "a cup at 2, 0 gently None")
    assert said(pool, "counts", numbers=[1, 2.5]) == ("ok", '{\n  "sum": 3.5\n}')
    reason, text = said(pool, "fails")
    assert reason == "raised" and "no such thing" in text
    reason, text = said(pool, "put", what="a cup")
    assert reason == "raised" and "where" in text
    assert said(pool, "draws") == (
        "raised",
        "Error: draws: ToolError: it answered by image, which a model of text cannot read",
    )


def test_tools_of_a_server_are_those_that_it_lists():
    with EnvironmentPool(servers(reference={"command": REFERENCE}), 1, 30.0) as pool:
        offered = [schema["function"] for schema in pool.offer.tools]
        for ours, theirs in zip(offered, listed(), strict=True):
            assert {**ours, "parameters": None} == {**theirs, "parameters": None}
            assert ours["parameters"] == {"required": []} | theirs["parameters"]
        check_reference(pool)
    put = offered[0]["parameters"]
    assert typed_parameters(put) == {
        "what": {"type": ["string"]}, "where": {"type": ["object"]}, "how": {"type": ["string"]},
        "times": {"type": ["integer", "null"]},
    }  # fmt: skip
    (call,) = made_up_calls({"put": offered[0]}, 1, 1)
    assert call.arguments == {"what": "1", "where": {}}


def serve(port: int) -> subprocess.Popen:
    process = subprocess.Popen([*REFERENCE, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(0.1)
    raise AssertionError("the server does not listen")


def test_a_server_over_http_that_goes_away_and_comes_back_costs_the_calls_meanwhile():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = serve(port)
    try:
        spec = ToolsSpec((), network=True, mcp_servers={"there": {"url": f"http://127.0.0.1:{port}/mcp"}})
        with EnvironmentPool(spec, 1, 30.0) as pool:
            check_reference(pool)
            process.kill()
            process.wait()
            reason, text = said(pool, "put", **PUT)
            assert reason == "raised" and "Error: put: ToolError: " in text
            process = serve(port)
            assert said(pool, "put", **PUT)[0] == "ok"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    log = tmp_path_factory.mktemp("odd") / "log"
    with EnvironmentPool(servers(odd={"command": [*ODD, "does,goes"]}), 1, 3.0, log) as pool:
        yield SimpleNamespace(pool=pool, log=log)


def alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("what", "reason", "why"),
    [
        ("stray", "ok", ""),
        ("a long answer", "ok", "yyy"),
        ("die", "raised", "the server has ended"),
        ("many lines", "raised", f"wrote {MOST_LINES} lines for one call"),
        ("a long line", "raised", "wrote a message of more than"),
        ("hang", "timeout", "no answer within 3 s"),
        ("connect", "raised", "PermissionError"),
        ("write", "raised", "PermissionError"),
    ],
)  # fmt: skip
def test_what_a_server_does_costs_its_call_alone(odd, what, reason, why):
    said_reason, text = said(odd.pool, "does", what=what)
    assert (said_reason, why in text) == (reason, True), text
    assert said(odd.pool, "does", what="say who")[0] == "ok"


def test_a_server_that_changes_its_tools_costs_calls_of_those_that_are_gone(odd):
    before = [name_of(schema) for schema in odd.pool.offer.tools]
    assert before == ["does", "goes"]
    assert said(odd.pool, "does", what="change")[0] == "ok"
    for name in before:
        reason, text = said(odd.pool, name, what="say who")
        assert reason == "raised" and "LookupError" in text
    assert [name_of(schema) for schema in odd.pool.offer.tools] == before
    for _ in range(100):  # its keeper takes a moment to write
        lines = [line for line in odd.log.read_text().splitlines() if "are not those that it had" in line]
        if lines:
            break
        time.sleep(0.1)
    assert len(lines) == 1 and "gone: does, goes;" in lines[0]
    assert said(odd.pool, "other", what="say who") == (
        "refused",
        "Error: there is no tool 'other'; there are: does, goes",
    )


def test_servers_end_with_the_pool():
    with EnvironmentPool(servers(odd={"command": ODD}), 1, 10.0) as pool:
        server = said(pool, "does", what="say who")[1]
        child = said(pool, "does", what="child")[1]
        assert alive(server) and alive(child)
    assert not alive(server) and not alive(child)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"a": {"command": ["no-such-program"]}}, "rollout.turns.mcp_servers.a.command: no executable program"),
        ({"a": {"command": [sys.executable, "-c", ""]}}, "a: the server does not list its tools: the server has ended"),
        *seldom(
            [
                ({"a": {"command": ODD, "tools": ["sings"]}}, "a: `tools` names 'sings'; the server has does"),
                ({"a": {"command": [*ODD, "n" * 65]}}, "a name has at most 64 bytes"),
                ({"a": {"command": ODD}, "b": {"command": ODD}}, "b: another server has the tool 'does' too; set a"),
            ],
        ),
    ],
)
def test_a_server_that_offers_nothing_is_refused_at_the_start(given, why):
    with pytest.raises(ConfigError, match=why):
        check_tools(servers(**given))


def test_names_of_two_servers_are_told_apart_by_a_prefix():
    given = {"a": {"command": ODD}, "b": {"command": ODD, "prefix": "b_", "tools": ["does"]}}
    with EnvironmentPool(servers(**given), 1, 10.0) as pool:
        assert [name_of(schema) for schema in pool.offer.tools] == ["does", "b_does"]
        first, second = said(pool, "does", what="say who"), said(pool, "b_does", what="say who")
        assert first[0] == second[0] == "ok" and first[1] != second[1]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "needs either a command or a url"),
        ({"command": "x", "url": "http://x"}, "needs either a command or a url"),
        ({"cmd": ["x"]}, "has 'cmd'; known: command, url, tools, prefix, headers"),
        ({"url": "localhost:80"}, "begins with http"),
        ({"command": ["x", 1]}, "a command that is no list of texts"),
        ({"command": ["x"], "headers": {"a": "B"}}, "has headers, which a command is not given"),
        ({"url": "http://x", "headers": ["a"]}, "headers that are no mapping"),
    ],
)
def test_an_entry_that_says_too_little_or_too_much_is_refused(given, why):
    with pytest.raises(ValueError, match=why):
        ServerSpec.of("a", given)


def test_changes_and_answers_are_told():
    def schema(name, description=""):
        return {"function": {"name": name, "description": description}}

    assert changes_of([schema("a"), schema("b"), schema("c")], [schema("b", "x"), schema("c"), schema("d")]) == (
        "gone: a; changed: b"
    )
    text = SimpleNamespace(type="text", text="one")
    image = SimpleNamespace(type="image", data=b64encode(b"a picture").decode())
    link = SimpleNamespace(type="resource_link", uri="file:///a")
    embedded = SimpleNamespace(type="resource", resource=SimpleNamespace(text="two"))
    assert reply_with([text, image, link, embedded]) == Reply("one\nfile:///a\ntwo\n[image left out]", images=[])
    assert reply_with([text, image, link], sees=True) == Reply("one\nfile:///a", images=[b"a picture"])
    assert reply_with([image], {"a": 1}, sees=True) == Reply("", images=[b"a picture"])
    assert reply_with([], {"a": 1}).text == '{"a": 1}'
    with pytest.raises(ToolError, match="audio"):
        reply_with([SimpleNamespace(type="audio")])
    with pytest.raises(ToolError, match="no base64"):
        reply_with([SimpleNamespace(type="image", data="a picture")], sees=True)
