"""How fast is a training on several ranks?"""
