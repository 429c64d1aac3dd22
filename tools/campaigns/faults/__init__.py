"""A campaign of faults over all nine processes of `ferryman up`, under calls that must be answered.

processes   names, process ids and ports of a running cluster
isolation   a network, mounts and control groups of its own, so that no other work is harmed
draws       which fault comes next: pure
stages      which stage of a request's life an event begins, and whether it lasted: pure
conditions  what was away or cut, when; whether a request could have been served: pure
events      the lifecycle events and heartbeats as they come
effects     the faults themselves: signals, partitions, a full disk; each seen to happen
injector    waits for a stage and strikes
callers     calls that know the right answer, and go to the other router as a balancer would
excuses     which failure a fault took away itself: pure
ledgers     what workers, host-cache and routers hold at the end
traces      whether the log of each call is legal
"""
