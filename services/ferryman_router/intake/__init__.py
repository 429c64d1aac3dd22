"""Between doors and requests: bodies are read beside the loop, requests start and end."""
