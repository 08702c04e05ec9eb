"""What goes over our sockets. Reading order: trajectory, conversation, messages, codec, header_shape, seal, channel."""
