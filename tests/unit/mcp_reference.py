"""An MCP server made with the package `mcp`, over standard input, or with a port as argument over HTTP."""

import sys
from typing import Literal

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel

server = MCPServer("reference")


class Place(BaseModel):
    """A place."""

    row: int
    column: int = 0


@server.tool()
def put(what: str, where: Place, how: Literal["gently", "hard"] = "gently", times: int | None = None) -> str:
    """Puts something somewhere.

    In several lines.
    """
    return f"{what} at {where.row}, {where.column} {how} {times}"


@server.tool()
def counts(numbers: list[float]) -> dict[str, float]:
    """Counts."""
    return {"sum": sum(numbers)}


@server.tool()
def fails() -> str:
    """Fails."""
    raise ToolError("no such thing")


@server.tool()
def draws() -> Image:
    """Draws."""
    return Image(data=b"\x89PNG", format="png")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
