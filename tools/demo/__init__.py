"""The demo model: the text it learns from, its tokenizer, its training and its examination."""
