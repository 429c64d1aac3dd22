"""The router: the public door, and who of the fleet answers.

Thinking rooms (pure): `fleet`, `policy`, `queue`, `budget`. Shells: `journey` and `tokens` follow
a request through the workers, `api` and `grpc_api` speak with clients, `service` joins them.
"""
