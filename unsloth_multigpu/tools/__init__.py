"""Commands beside `run`. Nothing imports them."""
