"""What happens in `train()`?"""
