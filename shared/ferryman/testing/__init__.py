"""Doubles for tests: an engine without a model, stamps, a recorder of steps, a bus and an index in
memory. Each can fail in the ways of the real one; the product never imports this package."""
