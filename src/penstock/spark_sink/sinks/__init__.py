"""The sinks: functions for `foreachBatch` whose effect is exactly-once."""
