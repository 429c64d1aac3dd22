"""The prefill worker: computes prompts and hands them off, pages first, state last."""
