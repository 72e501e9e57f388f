"""Who is let into an embedded broker: protocols, certificates made on the spot, rights."""
