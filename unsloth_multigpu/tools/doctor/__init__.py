"""Is this machine ready for training on several GPUs?"""
