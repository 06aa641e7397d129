"""Which checkpoint is whole, and where does a training resume?"""
