"""Files that survive a crash, and locks between processes. Reading order: files, lock."""
