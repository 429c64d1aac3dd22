"""Logits to tokens: filters, draws, penalties, rules, and log probabilities of prompts."""
