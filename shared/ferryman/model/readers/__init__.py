"""Readers of `config.json` that make the shapes which families share."""
