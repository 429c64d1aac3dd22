"""The doors: HTTP for OpenAI's and Anthropic's clients, gRPC for the SDK, and who may pass."""
