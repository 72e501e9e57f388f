"""The store in a database. It needs SQLAlchemy; the code that uses the user's own connections does not."""
