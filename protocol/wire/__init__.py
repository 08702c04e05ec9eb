"""What goes over our sockets. Reading order: trajectory, messages, codec, header_shape, seal, channel."""
