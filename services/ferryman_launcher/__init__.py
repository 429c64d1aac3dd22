"""A cluster as child processes of one machine: plans its processes and keeps them running.

Its callers (the commands, the benches) are other packages.
"""
