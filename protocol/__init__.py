"""Everything that two processes must agree on: messages, channels, weights, HTTP bodies, settings, files."""
