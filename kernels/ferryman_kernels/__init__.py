"""One op a file: formula, torch reference, Triton kernel, launcher."""
