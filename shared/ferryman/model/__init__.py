"""Model families over paged, slot-indexed state: config, weights, layers, and their manifests.

Knows no request, no network, no asyncio. A formula that runs on the device lives in the kernels.
"""
