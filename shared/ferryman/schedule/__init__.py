"""Requests, admission and steps as integers: decides the next step and its slots. Pure, like
`cache`."""
