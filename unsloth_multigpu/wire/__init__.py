"""How do the supervisor and its ranks communicate?"""
