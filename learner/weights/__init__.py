"""The learner's half of a weight push. Reading order: push, buckets, link, feed, calls, rendezvous."""
