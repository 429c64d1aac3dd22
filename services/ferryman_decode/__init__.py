"""The decode worker: takes over prefilled requests and streams their tokens to routers."""
