"""Does the training fit whole on each GPU, or in parts?"""
