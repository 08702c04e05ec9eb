"""Tools of MCP servers, by the official client library. Reading order: tools, server, connection."""
