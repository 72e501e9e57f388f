"""The store in a database. It needs SQLAlchemy; what speaks on the user's own connections does not."""
