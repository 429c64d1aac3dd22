"""Domain values to messages and back, both directions side by side; a file per family.

What comes from outside is checked here: a malformed message is InvalidRequest, never a surprise.
"""
