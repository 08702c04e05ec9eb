"""The learner's half of a weight push. Reading order: push, feed, link, rendezvous, card."""
