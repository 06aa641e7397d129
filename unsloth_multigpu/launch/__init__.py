"""How do processes start?"""
