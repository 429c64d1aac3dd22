"""Tests of clients are a package, so that one cluster can serve all of them and end with them."""
