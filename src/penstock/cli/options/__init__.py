"""What commands have in common: how they reach a cluster, and the app that they load."""
