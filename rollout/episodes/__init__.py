"""One sample, from prompt to trajectory. Reading order: player, conversation, transcript, chat_tokens."""
