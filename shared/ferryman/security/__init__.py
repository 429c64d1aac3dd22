"""Secrets and certificates of a cluster. Knows neither settings nor messages."""
