"""Attention to blocks of keys that an index chooses: the index, and the tables of what it chose."""
