"""What leaves the process: messages, subjects, gRPC, NATS, the Redis index and the data plane.

Domain values become messages here and nowhere else. What may be said when is `ferryman.handoff`'s;
this package knows no engine and no model.
"""
