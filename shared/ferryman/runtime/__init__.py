"""How a process lives: start, stop, settings, logs, metrics, lifecycle events."""
