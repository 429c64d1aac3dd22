"""Activations of gated MLPs, of one product's outputs: gate's first, then up's."""
