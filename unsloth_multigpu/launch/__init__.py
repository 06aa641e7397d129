"""How do processes start, and who failed first?"""
