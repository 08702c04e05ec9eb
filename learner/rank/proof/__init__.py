"""A checkpoint proves itself. Reading order: witness (what ranks hold), prove (what files hold), process, proofs."""
