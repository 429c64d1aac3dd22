"""Ferryman's library: the pure core, the device work, the wire, and the SDK."""
