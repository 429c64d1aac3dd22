"""`ferryman doctor`: what is wrong with a machine, a model folder or a cluster, and what mends it.

fault_report  a fault, and the report of all of them
machine       limits, disks, ports, memory, files with secrets
model_folder  tokenizer, template, weights
broker        NATS: login, lifecycle log, clock
index         Redis: login, eviction, clock
processes     what the processes of a state folder do
fleet         what heartbeats and answers say about versions, state, clocks and arenas
probes        orders to processes: about themselves, and to move bytes to each other
examination   all of it, in order
"""
