"""How does a notebook's kernel become one of several ranks?"""
