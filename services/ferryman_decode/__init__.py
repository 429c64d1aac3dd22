"""The decode worker: takes prefilled requests over and streams their tokens to routers."""
