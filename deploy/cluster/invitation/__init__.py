"""A one-time code in place of the join file: given on the head, taken on a node. Reading order: code, give, take."""
