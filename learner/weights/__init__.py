"""The learner's half of a weight push. Reading order: push, link, meeting, server_control."""
