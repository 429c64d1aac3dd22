"""The host and storage tiers of a node as values: reads, writes, leases and eviction.

Pure, for two callers: the host-cache, which owns the bytes, and the simulator, which has none.
"""
