"""Layers with experts: chosen by a softmax, in groups, or behind latent attention."""
