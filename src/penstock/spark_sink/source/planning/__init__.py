"""What the driver plans: which partitions, from which offset to which, cut into tasks."""
