"""What has this machine, and does it work?"""
