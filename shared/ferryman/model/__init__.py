"""Model families over paged, slot-indexed state: config, weights, layers, and their manifests.

This package knows no request, no network, no asyncio. Formulas that run on the device are in the
kernels.
"""
