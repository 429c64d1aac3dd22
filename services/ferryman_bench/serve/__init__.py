"""`ferryman bench serve`: a load on any server that answers as OpenAI's does.

A `Workload` has sessions of turns; `LoadRun` sends them, in open or closed loop, and keeps a
`TurnRecord` of each; statistics, the page and the comparison are made of records alone.
"""
