"""Layers and the decoders that are built of them. A family chooses among them."""
