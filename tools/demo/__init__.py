"""The demo model: its training text, its tokenizer, its training and its examination."""
