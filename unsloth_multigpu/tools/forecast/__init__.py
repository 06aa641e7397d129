"""How long would a script take on N GPUs, and what limits it?"""
