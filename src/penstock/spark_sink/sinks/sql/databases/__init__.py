"""What differs between databases: statements, types, errors and rights; a new database begins here."""
