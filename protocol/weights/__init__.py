"""The protocol between both halves of a weight push. Reading order: controls, wire, digest, group, same_machine."""
