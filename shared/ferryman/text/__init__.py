"""Text on both sides of a model: tokenizer, chat template, incremental detokenizer, stop strings.

Used by the router and by the offline engine; workers see token ids only. No clock, no network.
"""
