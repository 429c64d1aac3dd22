"""The router: takes requests in, chooses workers for them, and joins the answers.

Pure: `fleet`, `routing_policy`, `prefix_sources`, `queue`, `forecast`, `attempt_result`,
`generate_request`. Shells: `request_runner` follows a request through the workers (with a
`placement`, one `attempt` at a time, and a `response`), `token_streams` and `worker_client` speak
with workers, `http` and `grpc_server` with clients, `service` joins them. `reader` is a process of
its own, which reads large bodies.
"""
