"""Indexes that searches are answered from: BM25."""
