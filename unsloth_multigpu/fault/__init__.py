"""What if a rank dies, hangs, or is told to stop?"""
