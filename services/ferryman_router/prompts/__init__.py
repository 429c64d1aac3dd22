"""Prompts with what is known of their places: what callers marked, and where messages stand."""
