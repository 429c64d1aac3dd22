"""Recurrences whose gates are exponentials, with a norm and a running maximum beside the state."""
