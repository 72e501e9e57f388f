"""The state of one half partition, from the records of its logs. Pure."""
