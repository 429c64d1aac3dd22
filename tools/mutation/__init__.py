"""Planted defects: their lists, a copy of the tree to plant them in, and the run of their tests."""
