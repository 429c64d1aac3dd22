"""The bus: subjects, the messages on them, and the lifecycle log."""
