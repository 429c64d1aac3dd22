"""Sizes of layers and their state, batches, views of the slabs. Imports nothing of the model."""
