"""A cluster of `ferryman up` on this machine: detached, looked at, read, ended."""
