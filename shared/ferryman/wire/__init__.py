"""Communication with other processes: messages, subjects, gRPC, NATS, the Redis index, the data
plane.

Domain values become messages here and nowhere else. `ferryman.handoff` decides which message is
legal when; this package knows no engine and no model.
"""
