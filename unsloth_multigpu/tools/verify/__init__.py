"""Is it the same training as on one process?"""
