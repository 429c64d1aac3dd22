"""What may be said about a hand-off, and when: tables of (state, event) → state.

Pure: values in, values out; `now` is an argument and effects are returned. Bytes and sockets live
in `wire`, slots in `cache`.
"""
