"""The retrieval service of a node: corpus -> words -> bm25 -> index_folder -> service -> serve (or build)."""
