"""The retrieval service of a node: corpus -> indexes -> index_folder -> searcher -> service -> serve (or build)."""
