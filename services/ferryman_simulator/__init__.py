"""`ferryman simulate`: a trace of requests through the scheduler, the planner, the prefix tree and
the host tier that the services run, with a model of time and bytes in place of a device.

The services' own code makes every decision; this package models costs and keeps counts.
"""
