"""Recurrences: short convolutions, Mamba scans and steps, delta rules."""
