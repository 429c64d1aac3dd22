"""The table of bits: which ways of reusing state give a cold run's bits, and where others part."""
