"""Weights that stay in the few bits they are stored in: their formats, their matrices, products.

A format (`fp8`, `mxfp4`, `int8`, …) reads `quantization_config` and a checkpoint's tensors. All
of them make the same value, a `QuantisedMatrix`, which layers cut, join and multiply by.
"""
