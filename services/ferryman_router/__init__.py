"""The router: takes requests in, chooses workers for them, and joins the answers.

From the top down: `doors` (HTTP, gRPC) read `bodies` through `intake` and write `answers`;
`request` takes one request through the workers, attempt by attempt; `routing` chooses the workers.
Most of `routing` is pure, and so is `request.attempt_result`. `service` joins all of it.
"""
