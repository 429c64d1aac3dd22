"""Ways through a real cluster: broker, index, router, workers and host-caches, each a process."""
