"""What two processes must agree on: messages, codec, channels, versions, HTTP bodies, settings, log format."""
