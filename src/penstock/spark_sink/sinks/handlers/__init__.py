"""The handlers of an app on Spark's executors: `HandlerSink`, public as `penstock.spark_sink.HandlerSink`."""
