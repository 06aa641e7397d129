"""Who are the ranks, and are they equal?"""
