"""Agents and their frameworks run by themselves against a cluster: `python -m tools.agents`.

Each is installed from its own index, set up as docs/clients.md says, and asked two questions that
it can only answer by a tool.
"""
