"""Which samples, where?"""
