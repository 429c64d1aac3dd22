"""`ferryman bench`: this machine's figures, each a ratio to a peer or an aim of the same run."""
