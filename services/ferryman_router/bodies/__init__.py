"""Reads the JSON of each API into one request: fields, messages, and what is refused."""
