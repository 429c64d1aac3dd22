"""Row-wise operations between the products: norms, gated activations, rotation."""
