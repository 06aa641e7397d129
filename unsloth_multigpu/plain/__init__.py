"""Training loops without a Trainer."""
