"""Cached state and its owners: manifest, keys, slots, the page trie, the plan, sizing.

Pure: standard library and numpy index arithmetic. No clock, no randomness, no I/O, no tensors.
"""
