"""A worker's access to its node's host-cache: calls, and the arena that both map."""
