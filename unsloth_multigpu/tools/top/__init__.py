"""What is a running job doing now, rank by rank?"""
