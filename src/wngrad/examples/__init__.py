"""Examples that run as they are: `wngrad example NAME` writes one. Nothing imports them."""
