"""Channels, servers and statuses: the common part of all calls between processes."""
