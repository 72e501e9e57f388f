"""How values become bodies of messages and results become values: decoders, encoders, serializers with a registry."""
