"""The indexes of the retriever.

Reading order: index, by_name, bm25, encoder, dense.
"""
