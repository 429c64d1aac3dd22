"""Models by their id on the Hugging Face hub."""
