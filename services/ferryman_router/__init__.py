"""The router: the public door, and who of the fleet answers.

Thinking rooms (pure): `fleet`, `policy`, `queue`, `budget`. Shells: `journey` and `tokens` follow
a request through the workers (a journey has a `placing`, an `attempt` with its `prefill_call` at a
time, and an `answer`), `api` and `grpc_api` speak with clients, `service` joins them.
"""
