"""OpenAI-compatible address for agents. Reading order: player, session, branches, rendering, requests, app."""
