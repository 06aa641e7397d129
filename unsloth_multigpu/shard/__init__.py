"""Models that do not fit one GPU: who shards them, and how much memory they need."""
