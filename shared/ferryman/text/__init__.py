"""Text on both sides of a model: tokenizer, chat template, incremental detokenizer, stop strings.

The router and the offline engine use it; workers see token ids only. No clock, no network.
"""
