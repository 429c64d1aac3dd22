"""The data of the web page at `/`: the fleet, rows of requests, one request in full."""
