"""How is a step computed, and is its gradient that of one process?"""
