"""Agents' way to generate: an OpenAI-compatible address per server. Reading order: player, sample_turns, agent_session,
conversations_of, app.
"""
