"""The SDK: one asynchronous, typed client of a Ferryman cluster."""
