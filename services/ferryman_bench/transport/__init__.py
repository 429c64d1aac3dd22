"""The rates of single parts: the data planes, loads into slots, lookups in the index."""
