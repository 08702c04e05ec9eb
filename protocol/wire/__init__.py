"""Messages between processes. Reading order: trajectory, conversation, messages, codec, header_shape, channel."""
