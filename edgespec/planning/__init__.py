"""Before anything is trained: does it fit, does it pay, how long does it take?"""
