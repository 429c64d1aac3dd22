"""Checks of options, model, tiers and memory before anything starts."""
