"""One sample, from prompt to trajectory. Reading order: sample, player, conversation, transcript, chat_tokens."""
