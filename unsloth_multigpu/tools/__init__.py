"""The commands besides `run`. The rest of the package does not import them."""
