"""Our formulas against an independent implementation of them. Reading order: __main__, peer, cases."""
