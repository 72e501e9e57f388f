"""The Data Source `penstock`: options, planning on the driver, reading on executors."""
