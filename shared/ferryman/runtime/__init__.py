"""The frame of a process: start, stop, settings, logs, metrics, lifecycle events."""
