"""From the JSON of each API to one request: fields, messages, and what is refused."""
