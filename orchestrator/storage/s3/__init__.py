"""Stores in a bucket of any S3-compatible server."""
