"""The loops of recurrences for the CPU, and the runs of tokens that they scan."""
