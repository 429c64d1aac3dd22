"""Settings, declared once: environment, file and flags are views of the declaration."""
