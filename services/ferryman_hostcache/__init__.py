"""One node's host memory: an arena that the node's workers map, and who may read and write where.

`store` thinks (pure), `arena` owns the bytes, `server` joins both to the wire.
"""
