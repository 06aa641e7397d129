"""Is the math right?"""
