"""Reports about requests, for people at a terminal: what matters first, in words, within the width.

phrases          words for reasons, tiers, phases and events
request_summary  a request in a few lines: its time, its reuse, why the rest was computed
waterfall        its time as phases of its processes, or with -v every event with its facts
routes           the reasons for a route
"""
