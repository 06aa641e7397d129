"""Which checkpoint is complete, and where does a training resume?"""
