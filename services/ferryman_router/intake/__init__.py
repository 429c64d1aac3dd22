"""Between doors and requests: bodies are read off the event loop, requests start and end."""
