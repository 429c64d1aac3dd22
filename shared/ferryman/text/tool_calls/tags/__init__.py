"""Formats that write each argument of a call between tags, as text: the tool's schema decides
whether a value means something else than itself."""
