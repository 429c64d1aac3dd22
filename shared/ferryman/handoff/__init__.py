"""The legal messages of a hand-off in each state: tables of (state, event) → state.

Other servers call it disaggregation of prefill and decode, or KV transfer.

Pure: values in, values out; `now` is an argument and effects are returned. Bytes and sockets live
in `wire`, slots in `cache`.
"""
