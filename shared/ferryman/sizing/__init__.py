"""What fits into a machine: its memory, the sizes of workers, and the plan of both."""
