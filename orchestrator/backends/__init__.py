"""Where attempts run: Ray runners, this process, or (in tests) a script."""
