"""The index of the nodes that hold each unit. Its entries are hints."""
