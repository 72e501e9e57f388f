"""`penstock tx`: what is pending in a store, and an operator's decisions."""
