"""One split of a request's keys: what every loop of attention on the CPU shares."""
