"""The choice of a worker for each request: fleet, queue, forecast, policy."""
