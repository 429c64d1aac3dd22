"""What prefill and decode workers have in common: one engine, one loop, one way to report.

Joins engine, wire and runtime, as a service's shell does; decides nothing. See docs/decisions/0002.
"""
