"""Domain values to messages and back, both directions side by side; a file per family.

A table (`message_table`) maps a value's fields to its message; hot and irregular messages are
written by hand. Messages from outside are checked here: a malformed message raises InvalidRequest,
and no other error.
"""
