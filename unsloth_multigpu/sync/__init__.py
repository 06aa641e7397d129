"""How do gradients meet?"""
