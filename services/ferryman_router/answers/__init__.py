"""From an answer's tokens to the JSON and events of each API."""
