"""Backbones (timm) and heads: how they are built, named, hashed and stored."""
