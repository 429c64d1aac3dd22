"""Vocabulary files of other formats, read into the description that `tokenizer.json` has."""
