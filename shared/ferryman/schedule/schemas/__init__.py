"""Schemas of callers: walks through them, and what of them no grammar holds."""
