"""Memory of a machine, sizes of workers, and the plan that fits one into the other."""
