"""Handlers of jobs, a module per kind; common code of several kinds is in this folder, too."""
