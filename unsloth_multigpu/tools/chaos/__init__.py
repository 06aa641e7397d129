"""Does a run end or continue as it should after a fault?"""
