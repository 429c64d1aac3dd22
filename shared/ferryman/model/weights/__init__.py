"""Weights from files to linear layers: checkpoints, matrices, adapters and quantised formats."""
