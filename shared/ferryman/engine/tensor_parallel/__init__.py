"""The ranks of one worker (tensor parallelism): rank 0 sends each step, the others run it too.

The number of a rank (`tp_rank` elsewhere) is the `rank` of its `Group`.
"""
