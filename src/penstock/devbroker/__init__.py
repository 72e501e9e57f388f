"""Embedded Kafka: a real broker in a child process, and the Java for it and for Spark.

`with DevBroker() as broker:` starts a broker. `broker.bootstrap_servers` is its address. With `security=` clients must
log in, and with `acls=` they need permissions.
"""

from penstock.devbroker.access import AskedRight
from penstock.devbroker.broker import DevBroker
from penstock.devbroker.java.jars import KAFKA_VERSION, jars_folder, kafka_jars
from penstock.devbroker.java.runtime import JavaRuntime, find_java
from penstock.devbroker.java.spark import spark_environment
from penstock.devbroker.security import Security, User

__all__ = [
    "KAFKA_VERSION",
    "AskedRight",
    "DevBroker",
    "JavaRuntime",
    "Security",
    "User",
    "find_java",
    "jars_folder",
    "kafka_jars",
    "spark_environment",
]
