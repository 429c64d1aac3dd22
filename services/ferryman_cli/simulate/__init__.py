"""`ferryman simulate`: a trace of requests through the scheduler, the planner, the prefix tree and
the host tier that the services run, with a model of time and bytes where they have a device.

Nothing that is decided is decided here; what is here costs seconds, or keeps count.
"""
