"""What runs steps on a device: slabs, the forward stream, the runner, bytes in and out of slots.

Knows no request's meaning, no network; `stream` alone bridges to asyncio. `fake` is the same engine
without torch, whose slots hold stamps instead of tensors.
"""
