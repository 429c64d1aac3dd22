"""The laboratory: contests with other engines, and benches of parts. Not installed."""
