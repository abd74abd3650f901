"""Converters: from data sets as they are published to shards with a class table."""
