"""The common part of prefill and decode workers: one engine, one loop, one way to report.

Connects engine, wire and runtime, as a service's shell does; decides nothing. See
docs/decisions/0002.
"""
