"""What a node keeps outside the device, as values: who reads, who may write, what is given up.

Pure, for two who need it: the host-cache, which owns the bytes, and the simulator, which has none.
"""
