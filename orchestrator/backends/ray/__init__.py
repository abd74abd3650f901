"""Attempts on a Ray cluster: warm, detached, named runner actors (``runner``) and the ``backend`` that fills them."""
