"""Models as GGUF files (llama.cpp): the container, its tensor types, and what its metadata says.

No module here imports torch, because the router reads a model's documents, too.
"""
