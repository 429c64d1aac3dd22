"""Products with weights in blocks: codes of 4 to 8 bits with a scale for 16 or 32 of them."""
