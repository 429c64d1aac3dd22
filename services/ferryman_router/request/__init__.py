"""One request on its way through workers: attempts, placement, token streams, response."""
