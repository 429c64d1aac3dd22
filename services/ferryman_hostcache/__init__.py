"""One node's host memory: an arena that the node's workers map, with leases to read and write.

`ferryman.tiers` decides (pure), `arena` owns the bytes, `server` connects both to the wire.
"""
