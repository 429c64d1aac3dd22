"""Attention over pages: full, windowed, latent and sparse; writing keys and values."""
