"""Measures of a backbone's features, as pure functions over streams of them."""
