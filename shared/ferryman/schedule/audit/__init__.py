"""The audit of reuse: which requests are computed again, cold, and when. Pure, like `schedule`."""
