"""Formats whose calls are written as Python writes them."""
