"""`penstock check`: what an app would run with, and whether its cluster lets it."""
