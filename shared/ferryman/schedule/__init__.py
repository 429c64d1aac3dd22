"""Who runs next and on which slots: requests, admission, steps as integers. Pure, like `cache`."""
