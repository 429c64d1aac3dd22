"""The worker that prefills and decodes: both services on one engine, one set of pools."""
