"""What does a fault do to a run?"""
