"""Tools of MCP servers, by the official client library. Reading order: server, connection."""
