"""What a person types: start a cluster, talk to it, and see what it did and why.

Services are started as processes and spoken to by wire; none of them is imported here.
"""
