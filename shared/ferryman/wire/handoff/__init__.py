"""The transports for the units of a hand-off from prefill to decode: NIXL or gRPC."""
