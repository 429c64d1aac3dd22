"""Reads a model's output in its own format: text, thoughts, and calls of tools.

One file a format, named as in vLLM (`--tool-parser`). A format is a grammar that takes one
character at a time, so it does not matter how the text was cut. Pure: no clock, no network.
"""
