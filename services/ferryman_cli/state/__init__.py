"""`ferryman state`: a conversation's state as a file."""
