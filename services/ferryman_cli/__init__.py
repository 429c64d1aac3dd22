"""The commands that a person types: start a cluster, talk to it, and see what it did and why.

Services are started as processes and called over the network; none of them is imported here.
"""
