"""Model families over paged, slot-indexed state: config, weights, layers, and their manifests.

From the top down: loading (the modules here), `families`, `layers`, `readers` of configs,
`weights`, `sampling`, and `shapes`. This package knows no request, no network, no asyncio. Formulas
that run on the device are in the kernels.
"""
