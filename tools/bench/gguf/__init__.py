"""Model folders as GGUF files, so that llama.cpp runs the same weights as this repository."""
