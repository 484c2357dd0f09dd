"""A small MCP server: `python mcp_server.py stdio`, or `python mcp_server.py http PORT`."""

import os
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver import Image

server = MCPServer("test")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def fail(reason: str) -> str:
    """Fail."""
    raise ValueError(reason)


@server.tool()
def draw() -> Image:
    """Draw something."""
    return Image(data=b"not really a picture", format="png")


@server.tool()
def large() -> str:
    """Answer with 5,000 characters."""
    return "x" * 5000


@server.tool()
def leave() -> str:
    """End the server without a word."""
    os._exit(3)


if __name__ == "__main__":
    if "banner" in sys.argv:
        sys.stderr.write("banner of the server\n")
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
