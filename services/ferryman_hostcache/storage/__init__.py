"""The storage tier's shell: extents in a folder on a local disk, read and written off the loop.

`tiers/storage.py` thinks; `extent` is the format; `tier` is what the host-cache calls, whether
there is a folder (`folder_storage`) or not (`no_storage`).
"""
