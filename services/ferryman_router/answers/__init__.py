"""Turns an answer's tokens into the JSON and events of each API."""
