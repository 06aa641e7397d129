"""Who holds the group, and who steers the user's Trainer?"""
