"""One op a file: formula, torch reference, Triton kernel, launcher.

`attention`, `recurrence`, `products` and `elementwise` hold the ops, `cpu` the ground of compiled
loops; what all of them need (Triton's language, slots, ragged spans, precision) lies beside them.
"""
