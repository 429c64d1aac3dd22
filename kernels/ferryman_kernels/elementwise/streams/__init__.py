"""Residual paths of several streams: a row that is read of them, and what is written to them."""
