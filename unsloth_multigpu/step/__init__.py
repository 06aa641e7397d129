"""Which samples does each rank compute, and what does that cost?"""
