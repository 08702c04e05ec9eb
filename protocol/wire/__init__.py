"""Messages between processes. Reading order: trajectory, conversation, messages, codec, channel."""
