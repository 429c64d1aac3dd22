"""The storage tier's shell: extents in a blob store, read and written off the loop.

`tiers/storage.py` decides; `blob_storage` is the storage tier that the host-cache calls, over a
blob store; `blob_store` is the interface of a medium, `file_blob_store` the one on a local disk;
`extent` is the format.
"""
