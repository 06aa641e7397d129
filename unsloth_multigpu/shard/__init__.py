"""Does the training fit one GPU, or must the model be sharded?"""
