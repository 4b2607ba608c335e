"""Files to start a sweep from, as `wngrad sweep --init` writes them."""
