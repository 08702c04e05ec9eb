"""Indexes that searches are answered from.

Reading order: index, by_name, words, bm25, encoder, dense, faiss_file, hybrid, reranked.
"""
