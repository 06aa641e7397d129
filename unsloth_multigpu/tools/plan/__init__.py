"""How many GPUs does a script need, and should it be sharded?"""
