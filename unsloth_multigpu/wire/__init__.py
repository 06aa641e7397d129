"""What do the supervisor and its ranks tell each other?"""
