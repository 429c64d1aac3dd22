"""Products with weights: packed, grouped by expert, and of int8 codes."""
