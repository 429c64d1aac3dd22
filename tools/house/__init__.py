"""House rules: the modules of this repository, and what each rule finds in them."""
