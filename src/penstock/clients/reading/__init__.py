"""Reading partitions without joining a group: from a start to an end, one record, or on and on."""

from penstock.clients.reading.partition_reader import NotReadInTimeError, PartitionReader, Place, take
from penstock.clients.reading.settings import reading_settings, without_membership

__all__ = ["NotReadInTimeError", "PartitionReader", "Place", "reading_settings", "take", "without_membership"]
