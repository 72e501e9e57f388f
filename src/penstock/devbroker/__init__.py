"""Embedded Kafka: a real broker in a child process, and the Java that it and Spark need.

`with DevBroker() as broker:` starts one and `broker.bootstrap_servers` is its address.
"""

from penstock.devbroker.broker import DevBroker
from penstock.devbroker.jars import KAFKA_VERSION, jars_folder, kafka_jars
from penstock.devbroker.java import JavaRuntime, find_java
from penstock.devbroker.spark import spark_environment

__all__ = [
    "KAFKA_VERSION",
    "DevBroker",
    "JavaRuntime",
    "find_java",
    "jars_folder",
    "kafka_jars",
    "spark_environment",
]
