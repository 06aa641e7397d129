"""Which samples does each rank get, in which micro-batches, and at what cost?"""
